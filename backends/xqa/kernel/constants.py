"""The numbers that a configuration fixes, under the names by which kernels read them.

Here stand those of the smallest configuration, so that the kernels can be read and checked as they are;
`specialize.py` puts in the numbers of the configuration that is compiled or emulated.
"""

from __future__ import annotations

from mla.backends.xqa import config

_C = config.Config().constants

THREADS = config.THREADS
STEPS = config.STEPS  # tensor-core steps of a warp's share of D
LONGEST = config.LONGEST  # tokens of one request; no length counts further
PART_BYTES = 4 * config.RANK  # of one row of partial results, in fp32

ROW_TILES = _C["ROW_TILES"]  # 16-row tiles of query vectors in a block
ROWS = _C["ROWS"]  # query vectors in a block
BLOCKS_PER_SM = _C["BLOCKS_PER_SM"]  # blocks that share a multiprocessor
TILE = _C["TILE"]  # tokens in a tile of keys
TILE_BITS = _C["TILE_BITS"]  # log2 of it
STAGES = _C["STAGES"]  # tiles of keys in shared memory
AHEAD = _C["AHEAD"]  # of them, how many are copied while one is worked on
DIM_GROUPS = _C["DIM_GROUPS"]  # warp w takes D's part w % DIM_GROUPS,
DIM_GROUP_BITS = _C["DIM_GROUP_BITS"]
ROW_GROUPS = _C["ROW_GROUPS"]  # the rows' part w // DIM_GROUPS % ROW_GROUPS
ROW_GROUP_BITS = _C["ROW_GROUP_BITS"]
WARP_ROW_TILES = _C["WARP_ROW_TILES"]  # (so many 16-row tiles)
TOKEN_BLOCKS = _C["TOKEN_BLOCKS"]  # and of the tokens the next part, so many times 16

KEY_BYTES = _C["KEY_BYTES"]  # of one cache row
FLIPS = _C["FLIPS"]  # 16-byte chunks of a key that change places with each other, see `memory.flip_of_token`
STAGE_BYTES = _C["STAGE_BYTES"]
GROUP_BYTES = _C["GROUP_BYTES"]  # of a cache row, a warp's share
STEP_BYTES = _C["STEP_BYTES"]  # of it, one tensor-core step
CHUNKS = _C["CHUNKS"]  # 16-byte pieces of a cache row
LOADERS = _C["LOADERS"]  # threads that load one token together
LOADER_BITS = _C["LOADER_BITS"]
LOADS = _C["LOADS"]  # chunks that each of them takes
VALUE_BYTES = _C["VALUE_BYTES"]  # of a cache row, what a warp's 64 value dims take
VALUE_LOADS = _C["VALUE_LOADS"]  # 32-byte pieces of it
OUT_BYTES = _C["OUT_BYTES"]  # of one number of the output
QUERY_PITCH = _C["QUERY_PITCH"]  # bytes from one query in shared memory to the next
SCORE_PITCH = _C["SCORE_PITCH"]  # bytes from one row of partial scores to the next
WEIGHT_PITCH = _C["WEIGHT_PITCH"]  # bytes from one row of softmax weights to the next

ENTRY_WORDS = _C["ENTRY_WORDS"]  # registers of a thread that hold the table's entries of the first tiles
QUERY_WORDS = _C["QUERY_WORDS"]  # registers of a thread that hold queries
ACCUMULATORS = _C["ACCUMULATORS"]  # registers of a thread that hold output sums
SCORE_WORDS = _C["SCORE_WORDS"]  # registers of a thread that hold partial scores
WEIGHT_WORDS = _C["WEIGHT_WORDS"]  # softmax weights as A fragments
ROW_LANES = _C["ROW_LANES"]  # threads that work on one row's softmax
ROW_LANE_BITS = _C["ROW_LANE_BITS"]
TOKENS_EACH = _C["TOKENS_EACH"]  # tokens of a tile that each of them takes
SPAN = _C["SPAN"]  # neighbours among them

KEYS_AT = _C["KEYS_AT"]  # [STAGES, TILE, KEY_BYTES] bytes
SCORES_AT = _C["SCORES_AT"]  # [DIM_GROUPS, ROWS, SCORE_PITCH] fp32 partial scores
WEIGHTS_AT = _C["WEIGHTS_AT"]  # [ROWS, WEIGHT_PITCH] 16-bit softmax weights and [ROWS] decays, once or twice
WEIGHTS_BYTES = _C["WEIGHTS_BYTES"]  # of it, once
BIAS_AT = _C["BIAS_AT"]  # [STAGES, TILE] fp32: 0 a key, -inf none (a hole), NaN one that cannot be read
DECAY_AT = _C["DECAY_AT"]  # (from there) [ROWS] fp32: what the sums so far are multiplied by
FACTOR_AT = _C["FACTOR_AT"]  # [ROWS] fp32: what the finished sums are multiplied by
TOKENS_AT = _C["TOKENS_AT"]  # [ROWS] int32: the query token of each row
ZEROS_AT = _C["ZEROS_AT"]  # a warp's values of a token, all 0
FOUND_AT = _C["FOUND_AT"]  # 18 int32 for sums over the block
QUERIES_AT = _C["QUERIES_AT"]  # [ROWS, QUERY_PITCH] bytes, where queries are in shared memory
SHARED_BYTES = _C["SHARED_BYTES"]

EIGHT_BIT = _C["EIGHT_BIT"]
WIDENED = _C["WIDENED"]
EIGHT_BIT_QUERY = _C["EIGHT_BIT_QUERY"]
QUERIES_IN_SHARED = _C["QUERIES_IN_SHARED"]
VALUES_LATER = _C["VALUES_LATER"]
STARTS_LATE = _C["STARTS_LATE"]
SPARSE = _C["SPARSE"]
DEPENDENT = _C["DEPENDENT"]
