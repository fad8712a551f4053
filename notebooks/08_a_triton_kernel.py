# %% [markdown]
# # 8. A Triton kernel, built up in steps
#
# Triton is a language for GPU kernels that looks like Python. Its interpreter runs a kernel on a CPU, slowly, with
# numpy. That is enough to learn it, and to find out whether a kernel is right.
#
# **The one idea of this notebook:** a kernel is written for one *tile*: some rows of queries and some keys. Many
# programs run it at the same time, each with other numbers.
#
# The interpreter must be chosen before Triton is imported, so this is the first cell. As it comes, it rounds bf16
# wrongly; `repair` puts that right for this process.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from exercises import check
from pictures import GREY, PALE, cells, plt

from mla.backends.trtllm_gen.interpreter import repair
from mla.testing import Case, Mismatch, assert_close, build

repair()

# %% [markdown]
# ## Step 1: a program, and its place
#
# One query meets n keys. Each program takes 8 of them. `tl.program_id` says which program this is, and `tl.arange`
# makes a vector of indices. Indices past the end must not be loaded: that is what the mask is for. What is masked out
# becomes `other`.
#
# Widths of vectors are powers of two. A key has 576 numbers, which is 512 + 64. So there are two loads.


# %%
@triton.jit
def scores_kernel(q_ptr, keys_ptr, scores_ptr, n, BN: tl.constexpr):
    key = tl.program_id(0) * BN + tl.arange(0, BN)  # [BN] which keys
    there = key < n
    latent, rope = tl.arange(0, 512), 512 + tl.arange(0, 64)
    row = keys_ptr + key[:, None] * 576  # [BN, 1] where each key begins
    k_latent = tl.load(row + latent[None, :], mask=there[:, None], other=0.0)  # [BN, 512]
    k_rope = tl.load(row + rope[None, :], mask=there[:, None], other=0.0)  # [BN, 64]
    q_latent = tl.load(q_ptr + latent)  # [512]
    q_rope = tl.load(q_ptr + rope)  # [64]
    scores = tl.sum(k_latent * q_latent[None, :], 1) + tl.sum(k_rope * q_rope[None, :], 1)
    tl.store(scores_ptr + key, scores, mask=there)


random = torch.Generator().manual_seed(0)
n = 21
q, keys = torch.randn(576, generator=random), torch.randn(n, 576, generator=random)
scores = torch.empty(n)
scores_kernel[(triton.cdiv(n, 8),)](q, keys, scores, n, BN=8)  # 3 programs
print("largest error:", f"{(scores - keys @ q).abs().max():.0e}")

# %% [markdown]
# ## Step 2: a tile
#
# All heads meet the same keys. So take 16 query rows at once, and let `tl.dot` multiply matrices: that is what the
# tensor cores are for. A score tile is [16 rows, BN keys]. Then softmax within the tile, and a second `tl.dot` with
# the values. The values are the first 512 numbers of the keys: **they are there already.** Each key is loaded once and
# used twice.


# %%
@triton.jit
def tile_kernel(q_ptr, keys_ptr, out_ptr, n, scale, BM: tl.constexpr, BN: tl.constexpr):
    row, key = tl.arange(0, BM), tl.arange(0, BN)
    there = key < n
    latent, rope = tl.arange(0, 512), 512 + tl.arange(0, 64)
    q_latent = tl.load(q_ptr + row[:, None] * 576 + latent[None, :])  # [BM, 512]
    q_rope = tl.load(q_ptr + row[:, None] * 576 + rope[None, :])  # [BM, 64]
    k_latent = tl.load(keys_ptr + key[:, None] * 576 + latent[None, :], mask=there[:, None], other=0.0)  # [BN, 512]
    k_rope = tl.load(keys_ptr + key[:, None] * 576 + rope[None, :], mask=there[:, None], other=0.0)  # [BN, 64]
    z = scale * (tl.dot(q_latent, tl.trans(k_latent)) + tl.dot(q_rope, tl.trans(k_rope)))  # [BM, BN]
    z = tl.where(there[None, :], z, float("-inf"))  # a key that is not there weighs exp(-inf) = 0
    weights = tl.exp(z - tl.max(z, 1)[:, None])
    sums = tl.dot(weights.to(k_latent.dtype), k_latent)  # [BM, 512]
    tl.store(out_ptr + row[:, None] * 512 + latent[None, :], sums / tl.sum(weights, 1)[:, None])


H, scale = 16, 192**-0.5
q = torch.randn(H, 576, generator=random).bfloat16()
keys = keys.bfloat16()
out = torch.empty(H, 512)
tile_kernel[(1,)](q, keys, out, n, scale, BM=16, BN=32)
exact = torch.softmax(scale * (q.double() @ keys.double().T), -1) @ keys.double()[:, :512]
print("largest error:", f"{(out - exact).abs().max():.0e}", "(the weights were rounded to bf16)")

# %% [markdown]
# ## Step 3: a loop
#
# More keys than a tile holds: walk over blocks, with the online softmax of notebook 4. What lives through the loop is
# `top` [BM], `total` [BM] and `sums` [BM, 512]. Powers of 2 are cheaper than powers of e on a GPU, so the scores are
# multiplied by log2(e) first.
#
# ## Step 4: pages, lengths, several tokens
#
# * The grid has one program per request and row tile.
# * A row is one query vector: `row // H` is its token, `row % H` its head. It sees `length - Q + token + 1` keys.
# * A key lies in page `table[key // P]`. The page id is made 64 bits wide *before* it is multiplied: pools are large.
# * Loads past the length are masked, so nothing there is read at all.


# %%
@triton.jit
def attend_kernel(
    q_ptr, kv_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, bmm1, bmm2, width, P,
    Q: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.program_id(1) * BM + tl.arange(0, BM)  # [BM] of the request's Q * H query vectors
    live = row < Q * H
    length = tl.load(lens_ptr + request)
    sees = length - Q + row // H + 1  # [BM]
    latent, rope = tl.arange(0, 512), 512 + tl.arange(0, 64)
    at_q = q_ptr + (request * Q * H + row)[:, None] * 576
    q_latent = tl.load(at_q + latent[None, :], mask=live[:, None], other=0.0)  # [BM, 512]
    q_rope = tl.load(at_q + rope[None, :], mask=live[:, None], other=0.0)  # [BM, 64]

    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    sums = tl.zeros([BM, 512], tl.float32)
    for start in range(0, length, BN):
        key = start + tl.arange(0, BN)  # [BN]
        there = key < length
        page = tl.load(table_ptr + request * width + key // P, mask=there, other=0).to(tl.int64)
        at = kv_ptr + (page * P + key % P)[:, None] * 576
        k_latent = tl.load(at + latent[None, :], mask=there[:, None], other=0.0)  # [BN, 512]
        k_rope = tl.load(at + rope[None, :], mask=there[:, None], other=0.0)  # [BN, 64]
        z = tl.dot(q_latent, tl.trans(k_latent)) + tl.dot(q_rope, tl.trans(k_rope))  # [BM, BN]
        z = tl.where(key[None, :] < sees[:, None], z * bmm1 * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf - (-inf) would be NaN
        rescale = tl.exp2(top - shift)
        weights = tl.exp2(z - shift[:, None])
        total = total * rescale + tl.sum(weights, 1)
        sums = tl.dot(weights.to(k_latent.dtype), k_latent, sums * rescale[:, None])
        top = higher

    ends = tl.where(total == 0.0, 0.0, bmm2 / total)  # a row without a key is 0
    at_out = (request * Q * H + row)[:, None] * 512 + latent[None, :]
    tl.store(out_ptr + at_out, (sums * ends[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None])
    lse = tl.where(total == 0.0, float("-inf"), tl.where(top == float("-inf"), 0.0, top) + tl.log2(total))
    tl.store(lse_ptr + request * Q * H + row, lse, mask=live)


# %% [markdown]
# The picture has the programs of three requests with Q = 2 tokens of H = 16 heads, in tiles of 16 rows: one row of
# cells per program, one cell per block of keys that it walks over. Programs of long requests take longer. The GPU waits
# for the last one. The library's own kernel deals the blocks out evenly, and cuts long requests (notebook 4).

# %%
lengths, BN = (70, 300, 20), 32
figure, axes = plt.subplots(figsize=(8, 2.2))
rows = [(b, tile) for b in range(3) for tile in range(2)]
blocks = [triton.cdiv(lengths[b], BN) for b, _ in rows]
colours = [[PALE[b]] * count + [GREY] * (max(blocks) - count) for (b, _), count in zip(rows, blocks, strict=True)]
cells(axes, colours, rows=[f"program ({b}, {tile})" for b, tile in rows], title="blocks of 32 keys; grey: done, idle")
plt.show()

# %% [markdown]
# ## Step 5: before the oracle
#
# A function with the arguments of the call, so that the judge can call it.


# %%
def attend(*, query, kv_cache, block_tables, seq_lens, bmm1_scale, bmm2_scale, **others):
    B, Q, H, _ = query.shape
    out = torch.empty(B, Q, H, 512, dtype=torch.bfloat16)
    lse = torch.empty(B * Q, H)
    BM = 16
    attend_kernel[(B, triton.cdiv(Q * H, BM))](
        query, kv_cache, block_tables, seq_lens, out, lse, bmm1_scale, bmm2_scale,
        block_tables.shape[1], kv_cache.shape[1], Q=Q, H=H, BM=BM, BN=32,
    )  # fmt: skip
    return out, lse


for case in (
    Case(lengths=(1,)),
    Case(lengths=(70, 31), heads=16),
    Case(lengths=(33, 64, 5), heads=5, page_size=7),
    Case(lengths=(40, 9), q_len=3, heads=8, unread="inf", tail="int_max"),
    Case(lengths=(2, 0), q_len=4, heads=2),
):
    call = build(case)
    try:
        assert_close(call.run(attend), call.problem)
        print("right:", case)
    except Mismatch as mismatch:
        print("WRONG:", case, mismatch)

# %% [markdown]
# All right, within the budget of the number formats. And with less than 50 lines.
#
# ## What is still missing
#
# * Strides: everything is taken to be packed. Sparse lists, sinks, e4m3.
# * A NaN that only the *last* query token may see: here it is loaded for all rows of the tile, and 0 * NaN is NaN. Ask
#   for it:

# %%
call = build(Case(lengths=(9,), q_len=2, heads=4))
last_page = int(call.arguments["block_tables"][0, 0])
call.arguments["kv_cache"][last_page, 8] = float("nan")
out, _ = attend(**call.arguments)
print("token 0, which does not see the NaN:", "NaN" if out[0, 0].isnan().any() else "clean")

# %% [markdown]
# The library's kernel takes the last Q - 1 keys apart for this reason. Read it: `backends/trtllm_gen/decode_kernel.py`
# is this kernel with everything that is missing here.
#
# ## On a GPU
#
# With a GPU this cell times the library's compiled kernels, in a process of their own (Triton decides once per process
# whether it interprets). Without one it says what it skips.

# %%
import subprocess
import sys

if torch.cuda.is_available():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "mla", "bench", "--cases", "dp_b1_4k", "--peers", "none"]
    print(subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout)
else:
    print("no GPU here: skipped are the compiled kernels and their times")

# %% [markdown]
# ## Exercises
#
# **1.** B = 3, Q = 2, H = 128, and tiles of 64 rows. How many programs does the grid of step 4 have?

# %%
check("08-programs", None)

# %% [markdown]
# **2.** How often is each key of a request loaded then?

# %%
check("08-loads", None)

# %% [markdown]
# **3.** Page 60,000, P = 64, 576 numbers per slot. At which element does the page begin? (See why 32 bits do not do:
# they end at 2,147,483,647.)

# %%
check("08-address", None)

# %% [markdown]
# **4.** Write a kernel of your own: the mean of the first n rows of x [N, 64]. One program, a loop over blocks of 8
# rows, a mask. The rows past n hold NaN.


# %%
def mean_of_rows(x, n):
    """The mean of x[:n], [64], computed by a Triton kernel of yours."""
    return None


check("08-mean", mean_of_rows)
