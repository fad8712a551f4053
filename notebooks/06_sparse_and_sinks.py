# %% [markdown]
# # 6. Sparse top-k, and sinks
#
# With 100,000 tokens behind it, a query gives nearly all its weight to a few of them. DeepSeek-V3.2 uses that: a small
# network, the *indexer*, picks 2,048 tokens, and attention looks at those alone.
#
# **The one idea of this notebook:** softmax may run over any list of keys, and over a key that is not there. A *list*
# says which keys count. A *sink* is a key without a value.

# %%
import math

import torch
from exercises import check
from pictures import BLUE, GREY, ORANGE, PALE, WHITE, cells, plt

import mla

# %% [markdown]
# ## How few keys matter
#
# One query over 4,096 random keys. Sort the weights and add them up. (A trained model has its own curve.)

# %%
random = torch.Generator().manual_seed(1)
keys = torch.randn(4096, 576, generator=random)
query = 2 * torch.randn(576, generator=random)
weights = torch.softmax(192**-0.5 * (keys @ query), dim=0).sort(descending=True).values
share = weights.cumsum(0)
figure, axes = plt.subplots(figsize=(7, 2.4))
axes.plot(range(1, 4097), share, color=BLUE)
axes.set(xscale="log", xlabel="keys, the heaviest first", ylabel="share of the weight", ylim=(0, 1.05))
plt.show()
for k in (16, 64, 256):
    print(f"the {k:3} heaviest of 4096 keys have {share[k - 1]:.1%} of the weight")

# %% [markdown]
# ## The list
#
# With `sparse_mla_top_k = K`, `block_tables` has another shape and another meaning: [B, Q, K], and the entries are
# **slots** of the pool, `page * P + offset`. Each query token has its own list. Three rules:
#
# 1. The first `min(n, K)` entries count. n is the number of visible keys, as ever. The rest is not looked at.
# 2. A negative entry, or one past the pool, is a hole. It is skipped. It still uses up its place.
# 3. An entry that stands twice counts twice.

# %%
N, P = 3, 4
cache = torch.arange(N * P, dtype=torch.float32).view(N, P, 1).repeat(1, 1, 576)  # slot i holds the number i
call = dict(kv_cache=cache, workspace_buffer=None, qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64)
call |= dict(max_seq_len=12, bmm1_scale=192**-0.5)


def mean_of_list(entries, length):
    """The output for a query of zeros: the mean of the slots that count."""
    lists = torch.tensor([[entries]])  # [1 request, 1 token, K]
    out = mla.trtllm_batch_decode_with_kv_cache_mla(
        **call,
        query=torch.zeros(1, 1, 1, 576),
        block_tables=lists,
        seq_lens=torch.tensor([length]),
        sparse_mla_top_k=len(entries),
        out=torch.empty(1, 1, 1, 512),
    )
    return out[0, 0, 0, 0].item()


print("two slots:            ", mean_of_list([10, 4], 12))
print("a hole in front:      ", mean_of_list([-1, 10, 4], 12))
print("one of them twice:    ", mean_of_list([10, 10, 4], 12))
print("only 2 keys visible:  ", mean_of_list([10, 4, 7, 7], 2))
print("nothing but holes:    ", mean_of_list([-1, -1], 12))

# %% [markdown]
# The picture has the list `[9, 4, -1, 11, 6]` for a token that sees n = 4 keys. On top the list, below the pool.

# %%
entries, n = [9, 4, -1, 11, 6], 4
counts = [i for i, slot in enumerate(entries) if i < n and 0 <= slot < N * P]
figure, (top, bottom) = plt.subplots(2, 1, figsize=(8, 2.4), height_ratios=[1, 1])
colours = [[PALE[0] if i in counts else WHITE if slot < 0 else GREY for i, slot in enumerate(entries)]]
cells(top, colours, [[str(slot) for slot in entries]], columns=[f"entry {i}" for i in range(5)], rows=["list"])
chosen = {entries[i] for i in counts}
colours = [[PALE[0] if slot in chosen else GREY for slot in range(N * P)]]
columns = [f"{slot // P}:{slot % P}" for slot in range(N * P)]
cells(bottom, colours, [[str(slot) for slot in range(N * P)]], columns=columns, rows=["slots"])
bottom.set_xlabel("page:offset")
plt.show()
print("output:", mean_of_list(entries, n), "= (9 + 4 + 11) / 3")

# %% [markdown]
# There is no causal mask on the list. The indexer knows what may be seen, and lists nothing else.
#
# A list that names every visible token gives what the dense call gives. The order does not matter.

# %%
random = torch.Generator().manual_seed(2)
call["kv_cache"] = torch.randn(N, P, 576, generator=random)
query = torch.randn(1, 1, 2, 576, generator=random)
table = torch.tensor([[2, 0, 1]])
slots = torch.tensor([table[0, j // P] * P + j % P for j in range(11)])[torch.randperm(11, generator=random)]
common = dict(query=query, seq_lens=torch.tensor([11]))
dense = mla.trtllm_batch_decode_with_kv_cache_mla(**call, **common, block_tables=table, out=torch.empty(1, 1, 2, 512))
listed = mla.trtllm_batch_decode_with_kv_cache_mla(
    **call, **common, block_tables=slots[None, None], sparse_mla_top_k=11, out=torch.empty(1, 1, 2, 512)
)
print("largest difference of dense and listed:", f"{(dense - listed).abs().max():.0e}")

# %% [markdown]
# ## The sink
#
# Softmax weights always sum to 1. A head that finds nothing of interest must still put its weight somewhere. A sink
# gives it a place: one learned number s per head, which joins the denominator and brings no value:
#
# $$ \text{out} = \frac{\sum_j e^{z_j} v_j}{e^{s} + \sum_j e^{z_j}} $$
#
# It is a natural-log score, it is *not* multiplied by `bmm1_scale`, and it counts once per row. See what it does to
# four equal keys of value 1 as it grows.

# %%
call["kv_cache"] = torch.ones(N, P, 576)
sinks = torch.linspace(-4, 6, 21)
outs = mla.trtllm_batch_decode_with_kv_cache_mla(
    **call,
    query=torch.zeros(1, 1, 21, 576),  # 21 heads, one sink each
    block_tables=torch.tensor([[0]]),
    seq_lens=torch.tensor([4]),
    sinks=sinks,
    out=torch.empty(1, 1, 21, 512),
)[0, 0, :, 0]
figure, axes = plt.subplots(figsize=(7, 2.3))
axes.plot(sinks, outs, ".-", color=ORANGE, label="output")
axes.axvline(math.log(4), color=GREY, linestyle="--", label="ln 4: as heavy as the four keys")
axes.set(xlabel="sink", ylabel="output", ylim=(0, 1.05))
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Exercises
#
# **1.** P is 64. Which entry lists offset 5 of page 1000?

# %%
check("06-entry", None)

# %% [markdown]
# **2.** Slot i holds the number i, the query is zero, n is 3, the pool has 12 slots, and the list is
# `[12, 2, 8, 5]`. What is the output?

# %%
check("06-mean", None)

# %% [markdown]
# **3.** Three equal keys of value 8 and a sink of 0, with a query of zeros. What is the output?

# %%
check("06-sink", None)

# %% [markdown]
# **4.** Write the function that says which slots count.


# %%
def counted(entries, n, pool):
    """The slots of the list `entries` that count, in order, for n visible keys and a pool of `pool` slots."""
    return None


check("06-counted", counted)
