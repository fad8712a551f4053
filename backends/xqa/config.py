"""One configuration of the kernels: what is fixed when they are compiled, and every size that follows from it.

    kind             query    cache    QK^T multiplies            a step takes    PV multiplies
    bf16             bf16     bf16     bf16                       16 dims, 32 B   bf16
    fp16             fp16     fp16     fp16                       16 dims, 32 B   fp16
    e4m3             e4m3     e4m3     e4m3                       32 dims, 32 B   fp16, values widened in registers
    e4m3_by_fp16     e4m3     e4m3     fp16, both widened         16 dims, 16 B   fp16, values widened in registers
    bf16_on_e4m3     bf16     e4m3     bf16, keys widened         16 dims, 16 B   fp16, values widened in registers
    fp16_on_e4m3     fp16     e4m3     fp16, keys widened         16 dims, 16 B   fp16, values widened in registers

Softmax weights meet e4m3 values as fp16: e4m3 is a part of fp16, so the values are exact and the weights keep 11 bits.
Chips whose tensor cores do not multiply e4m3 by `mma.sync` (sm_90, sm_100) take "e4m3_by_fp16": the instruction exists
there, but is made of conversions of both operands, and of the query's again for each tile.
"""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 256
WARPS = THREADS // 32
MERGE_THREADS = 512  # of the merge kernel, at most
RANK = 512  # R, the width of a value
WIDTH = 576  # D, the width of a key
STEPS = 9  # tensor-core steps of a warp's share of D
LONGEST = 1 << 30  # tokens of one request; no length counts further

SHARED_LIMIT = {
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}
"""Compute capability -> bytes of shared memory that one block may have."""

SHARED_PER_SM = {capability: limit + 1024 for capability, limit in SHARED_LIMIT.items()}
"""Compute capability -> bytes that all blocks of a multiprocessor share; each costs 1024 more than it asks for."""

KINDS = ("bf16", "fp16", "e4m3", "e4m3_by_fp16", "bf16_on_e4m3", "fp16_on_e4m3")
MULTIPLIES_E4M3 = frozenset({(8, 9), (12, 0), (12, 1)})
"""Chips with e4m3 tensor cores behind `mma.sync`."""

SPILLS_64_ROWS = frozenset({(10, 0), (10, 3)})
"""Chips with shared memory for 64 rows, but ptxas keeps all sums of 64 rows in local memory for them."""


def _bits(power_of_two: int) -> int:
    return power_of_two.bit_length() - 1


@dataclass(frozen=True)
class Config:
    """What is fixed at compile time.

    Attributes:
        kind: see above.
        row_tiles: 16-row tiles of queries that one block holds: 1, 2 or 4. Four are kept in shared memory and not in
            registers, and half of the warps compute the scores of half of them.
        token_blocks: 16 tokens each, whose scores a warp computes one after the other: 1 or 2.
        sparse: tables hold token slots, not pages.
        aligned: keys begin at multiples of 16 bytes and query words at multiples of their size; else every number is
            loaded by itself.
        out: "bf16", "fp16" or "fp32". out_pairs: two neighbouring numbers of out may be written at once.
        stages: key tiles in shared memory: 2, 3 or 4. From three on a tile's values are added one tile later, see
            `kernel/decode.py`.
        blocks_per_sm: blocks that share a multiprocessor; registers are limited so that they can.
        dependent: the merge kernel may start before the decode kernel has ended (sm_90 and newer).
    """

    kind: str = "bf16"
    row_tiles: int = 1
    token_blocks: int = 1
    sparse: bool = False
    aligned: bool = True
    out: str = "bf16"
    out_pairs: bool = True
    stages: int = 2
    blocks_per_sm: int = 1
    dependent: bool = False

    @property
    def eight_bit(self) -> bool:
        """The cache is e4m3."""
        return "e4m3" in self.kind

    @property
    def widened(self) -> bool:
        """Keys are widened before they meet the query."""
        return self.eight_bit and self.kind != "e4m3"

    @property
    def multiplies(self) -> str:
        """The format in which queries meet keys."""
        return "fp16" if self.kind == "e4m3_by_fp16" else self.kind.partition("_")[0]

    @property
    def rows(self) -> int:
        """Query vectors that a block holds."""
        return 16 * self.row_tiles

    @property
    def key_bytes(self) -> int:
        """Bytes of one cache row."""
        return WIDTH * (1 if self.eight_bit else 2)

    @property
    def step_bytes(self) -> int:
        """Bytes of a cache row that one tensor-core step takes."""
        return 16 if self.widened else 32

    @property
    def dim_groups(self) -> int:
        """Warps are dealt over D ..."""
        return self.key_bytes // (STEPS * self.step_bytes)

    @property
    def row_groups(self) -> int:
        """... over rows ..."""
        return max(self.row_tiles // 2, 1)

    @property
    def tile(self) -> int:
        """... and over tokens: the tokens of one tile."""
        return 16 * self.token_blocks * WARPS // (self.dim_groups * self.row_groups)

    @property
    def queries_in_shared(self) -> bool:
        """Queries are read from shared memory for each tile, for want of registers."""
        return self.row_groups > 1

    @property
    def values_later(self) -> bool:
        """Values are added one tile after their scores were computed."""
        return self.stages > 2

    @property
    def loaders(self) -> int:
        """Threads that load one token together."""
        return THREADS // self.tile

    @property
    def ahead(self) -> int:
        """Tiles that are copied while one is worked on; a tile whose values are still to be added keeps its stage."""
        return self.stages - (2 if self.values_later else 1)

    @property
    def starts_late(self) -> bool:
        """The next copies start behind the scores and not before them. Two tiles are under way then, so that they lose
        nothing by it; with one under way they would, and tiles of 64 rows lose by it in any case."""
        return self.ahead > 1 and self.row_groups == 1

    @property
    def constants(self) -> dict[str, int | bool]:
        """The names that kernels read, see `kernel/constants.py`."""
        flips = 4 if self.eight_bit else 8
        score_pitch = 4 * self.tile
        query_pitch = STEPS * 32 * self.dim_groups + 16
        weight_pitch = 2 * self.tile + 16
        weights_bytes = self.rows * (weight_pitch + 4)
        sizes = {
            "KEYS_AT": self.stages * self.tile * self.key_bytes,
            "ZEROS_AT": 128,
            "SCORES_AT": self.dim_groups * self.rows * score_pitch,
            "WEIGHTS_AT": weights_bytes * (2 if self.values_later else 1),
            "BIAS_AT": self.stages * self.tile * 4,
            "FACTOR_AT": self.rows * 4,
            "TOKENS_AT": self.rows * 4,
            "FOUND_AT": 18 * 4,
            "QUERIES_AT": self.rows * query_pitch if self.queries_in_shared else 0,
        }
        places, end = {}, 0
        for name, size in sizes.items():
            places[name] = end
            end += -(-size // 16) * 16
        chunks = self.key_bytes // 16
        return places | {
            "SHARED_BYTES": end,
            "ROW_TILES": self.row_tiles,
            "ROWS": self.rows,
            "TILE": self.tile,
            "TILE_BITS": _bits(self.tile),
            "STAGES": self.stages,
            "DIM_GROUPS": self.dim_groups,
            "DIM_GROUP_BITS": _bits(self.dim_groups),
            "ROW_GROUPS": self.row_groups,
            "ROW_GROUP_BITS": _bits(self.row_groups),
            "WARP_ROW_TILES": self.row_tiles // self.row_groups,
            "TOKEN_BLOCKS": self.token_blocks,
            "KEY_BYTES": self.key_bytes,
            "FLIPS": flips,
            "STAGE_BYTES": self.tile * self.key_bytes,
            "GROUP_BYTES": STEPS * self.step_bytes,
            "STEP_BYTES": self.step_bytes,
            "QUERY_PITCH": query_pitch,
            "SCORE_PITCH": score_pitch,
            "WEIGHT_PITCH": weight_pitch,
            "WEIGHTS_BYTES": weights_bytes,
            "DECAY_AT": self.rows * weight_pitch,
            "VALUE_BYTES": 64 * self.key_bytes // WIDTH,
            "VALUE_LOADS": 2 * self.key_bytes // WIDTH,
            "OUT_BYTES": 4 if self.out == "fp32" else 2,
            "LOADERS": self.loaders,
            "LOADER_BITS": _bits(self.loaders),
            "CHUNKS": chunks,
            "LOADS": -(-chunks // self.loaders),
            "AHEAD": self.ahead,
            "BLOCKS_PER_SM": self.blocks_per_sm,
            "ENTRY_WORDS": 2 * self.ahead + 2,
            "QUERY_WORDS": self.row_tiles // self.row_groups * STEPS * 4,
            "ACCUMULATORS": self.row_tiles * 32,
            "SCORE_WORDS": self.row_tiles // self.row_groups * self.token_blocks * 8,
            "WEIGHT_WORDS": self.row_tiles * 4,
            "ROW_LANES": THREADS // self.rows,
            "ROW_LANE_BITS": _bits(THREADS // self.rows),
            "TOKENS_EACH": self.tile * self.rows // THREADS,
            "SPAN": min(self.tile * self.rows // THREADS, 4),
            "EIGHT_BIT": self.eight_bit,
            "WIDENED": self.widened,
            "EIGHT_BIT_QUERY": self.kind.startswith("e4m3"),
            "QUERIES_IN_SHARED": self.queries_in_shared,
            "VALUES_LATER": self.values_later,
            "STARTS_LATE": self.starts_late,
            "SPARSE": self.sparse,
            "DEPENDENT": self.dependent,
        }

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the decode kernel."""
        return int(self.constants["SHARED_BYTES"])
