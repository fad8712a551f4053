# %% [markdown]
# # 5. Several query tokens, and the mask at the bottom right
#
# A model can guess a few tokens ahead with little work. Then the large model checks all the guesses in one step. That
# step has Q query tokens per request in place of one, and reading the cache is paid for once.
#
# **The one idea of this notebook:** the Q new tokens are the *last* ones of the request. So query token t sees
# everything up to its own place: `n = length - Q + t + 1` keys.

# %%
import torch
from exercises import check
from pictures import GREY, PALE, cells, plt

import mla

# %% [markdown]
# ## The mask, drawn
#
# Rows are query tokens, columns are keys. The corner at the *bottom right* is where the last query token meets the last
# key. One diagonal up from there, each earlier token sees one key less.


# %%
def draw_mask(axes, length, q_len, sees, title):
    colours = [[PALE[0] if j < sees(length, q_len, t) else GREY for j in range(length)] for t in range(q_len)]
    texts = [["new" if j == length - q_len + t else "" for j in range(length)] for t in range(q_len)]
    rows = [f"t = {t}, n = {sees(length, q_len, t)}" for t in range(q_len)]
    cells(axes, colours, texts, rows=rows, columns=[str(j) for j in range(length)], title=title)


figure, (right, wrong) = plt.subplots(1, 2, figsize=(10, 2))
draw_mask(right, 8, 3, lambda length, q_len, t: length - q_len + t + 1, "right: aligned at the end (length 8, Q = 3)")
draw_mask(wrong, 8, 3, lambda length, q_len, t: t + 1, "wrong: aligned at the beginning")
plt.show()

# %% [markdown]
# "new" marks each query token's own key. It was appended to the cache *before* the call, and `seq_lens` counts it.
#
# ## Seen from outside
#
# Fill key j with the number j and ask with zeros. The output is the mean of what a token sees: of 0 ... n-1, which is
# (n - 1) / 2. So n = 2 * out + 1, and one can read the mask off the result.

# %%
cache = torch.zeros(2, 8, 576)
cache[:] = torch.arange(8.0)[:, None]
call = dict(kv_cache=cache, workspace_buffer=None, qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64)
call |= dict(block_tables=torch.tensor([[0], [1]]), max_seq_len=8, bmm1_scale=192**-0.5)


def seen(lengths, q_len):
    """n of each query token, [B][Q], measured."""
    out = torch.empty(2, q_len, 1, 512)
    query = torch.zeros(2, q_len, 1, 576)
    mla.trtllm_batch_decode_with_kv_cache_mla(**call, query=query, seq_lens=torch.tensor(lengths), out=out)
    return (2 * out[..., 0, 0] + 1).int().tolist()


print("Q = 1, lengths 8 and 5:", seen([8, 5], 1))
print("Q = 3, lengths 8 and 5:", seen([8, 5], 3))

# %% [markdown]
# ## Three at once is three times one
#
# The meaning of a call with Q = 3 is that of three calls with Q = 1 and growing lengths. Let us check that with random
# numbers, bit by bit.

# %%
random = torch.Generator().manual_seed(0)
call["kv_cache"] = torch.randn(2, 8, 576, generator=random)
query = torch.randn(2, 3, 4, 576, generator=random)  # [B, Q, H, D]
together = mla.trtllm_batch_decode_with_kv_cache_mla(**call, query=query, seq_lens=torch.tensor([8, 5]))
one_by_one = [
    mla.trtllm_batch_decode_with_kv_cache_mla(
        **call, query=query[:, t : t + 1], seq_lens=torch.tensor([8, 5]) - 3 + t + 1
    )
    for t in range(3)
]
print("the same bits:", torch.equal(together, torch.cat(one_by_one, dim=1)))

# %% [markdown]
# ## What may not be seen may not matter
#
# The keys past a token's own belong to guesses that may be refused. They may hold anything, NaN too. A kernel that
# loads them and multiplies by a weight of 0 has an error: 0 * NaN is NaN.

# %%
call["kv_cache"][0, 7] = float("nan")  # the last token of request 0
poisoned = mla.trtllm_batch_decode_with_kv_cache_mla(**call, query=query, seq_lens=torch.tensor([8, 5]))
for t in range(3):
    print(f"request 0, token {t}: {'NaN' if poisoned[0, t].isnan().any() else 'clean'}")

# %% [markdown]
# Only the token that sees the NaN has it. That is as it must be: an error that one token sees should show, and should
# not spread.
#
# ## Requests shorter than Q
#
# Batches are padded. A request of length 2 in a batch with Q = 4 has two query tokens that stand before its beginning.
# They see nothing, n is 0, and the output is 0.

# %%
call["kv_cache"] = cache
print("keys seen by a request of 2 tokens with Q = 4:", [max(2 - 4 + t + 1, 0) for t in range(4)])
out = mla.trtllm_batch_decode_with_kv_cache_mla(
    **call, query=torch.zeros(2, 4, 1, 576), seq_lens=torch.tensor([2, 8]), out=torch.empty(2, 4, 1, 512)
)
print("outputs:", out[0, :, 0, 0].tolist())

# %% [markdown]
# ## Why it is nearly free
#
# All Q * H query vectors of a request meet the same keys. A kernel puts them into one tile, row `t * H + h`, and loads
# each key once. The mask differs only in the last Q - 1 columns, so every earlier block of keys needs no mask at all.

# %%
figure, axes = plt.subplots(figsize=(9, 2.4))
length, q_len, heads, block = 24, 3, 2, 4
colours = [[PALE[0]] * (length - q_len + 1 + r // heads) for r in range(q_len * heads)]
colours = [row + [GREY] * (length - len(row)) for row in colours]
rows = [f"t = {r // heads}, h = {r % heads}" for r in range(q_len * heads)]
cells(axes, colours, rows=rows, title="one tile: Q = 3 tokens of H = 2 heads over 24 keys, in blocks of 4")
for x in range(0, length + 1, block):
    axes.axvline(x, color="black", linewidth=1)
plt.show()

# %% [markdown]
# ## Exercises
#
# **1.** `seq_lens` is 7 and Q is 3. How many keys does query token 0 see?

# %%
check("05-first", None)

# %% [markdown]
# **2.** Two guesses were made. The call has Q = 3: the last sure token and the two guesses. Before the call the cache
# held 100 tokens, and then the three were appended. What is `seq_lens`?

# %%
check("05-length", None)

# %% [markdown]
# **3.** With Q = 4 and blocks of 64 keys, a request has 256 keys. In how many of its 4 blocks is any key hidden from
# any query token?

# %%
check("05-blocks", None)

# %% [markdown]
# **4.** Write n as a function. Mind the padded ones.


# %%
def visible(length, q_len, t):
    """How many keys query token t sees."""
    return None


check("05-visible", visible)
