# %% [markdown]
# # 1. From multi-head attention to one latent, and what it saves
#
# A language model writes one token at a time. For each new token, attention looks back at every token before it. So
# the model keeps what it needs of each old token: the *cache*. In long conversations the cache is the largest thing
# in memory, and reading it is what takes the time.
#
# **The one idea of this notebook:** the keys and values of all heads come from one short vector per token, the
# *latent*. So cache the latent, and never build the keys and values at all.

# %%
import torch
from exercises import check
from pictures import bars, plt

import mla

# %% [markdown]
# ## What plain multi-head attention would keep
#
# DeepSeek-V3 has 128 heads. In each head a key has 192 numbers (128 of content and 64 that know the position), and a
# value has 128. With 2 bytes per number, one token of one layer costs:

# %%
heads, content, position, value = 128, 128, 64, 128
plain = heads * (content + position + value) * 2
print(f"{plain:,} bytes per token and layer")
print(f"{plain * 61 * 100_000 / 1e9:,.0f} GB for one conversation of 100,000 tokens through 61 layers")

# %% [markdown]
# No GPU holds that. But look where keys and values come from. For each token the model first makes
#
# * `c`, the latent: 512 numbers. Head h's content key is `W_K[h] @ c`, and its value is `W_V[h] @ c`.
# * `k`, the position key: 64 numbers, one for all heads.
#
# Let us make a small layer of this shape with random numbers: 4 heads, 10 old tokens, in float64.

# %%
random = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, generator=random, dtype=torch.float64)


H, n, R = 4, 10, 512  # heads, old tokens, numbers in a latent
W_K = draw(H, 128, R) / R**0.5
W_V = draw(H, 128, R) / R**0.5
c = draw(n, R)  # the latents
k = draw(n, 64)  # the position keys
q_content, q_position = draw(H, 128), draw(H, 64)  # the new token's query in each head
scale = (128 + 64) ** -0.5

# %% [markdown]
# ## The plain way
#
# Build every head's keys and values, then do what you know: scores, softmax, weighted sum of values.

# %%
keys = torch.einsum("hkr,nr->hnk", W_K, c)  # [H, n, 128]
values = torch.einsum("hvr,nr->hnv", W_V, c)  # [H, n, 128]
scores = torch.einsum("hk,hnk->hn", q_content, keys) + q_position @ k.T
plain_out = torch.einsum("hn,hnv->hv", torch.softmax(scale * scores, dim=-1), values)
print("numbers built for the keys and values:", keys.numel() + values.numel())
print("numbers that they were built from:    ", c.numel())

# %% [markdown]
# With 128 heads the keys and values are 64 times the latents, not twice.
#
# ## The trick: move the matrix to the other side
#
# A score is a dot product, and a matrix can change sides in it:
#
# $$ q \cdot (W_K\, c) \;=\; (W_K^\top q) \cdot c $$
#
# On the left, every old token is multiplied by a matrix. On the right, only the one new query is. The query has
# *absorbed* the matrix. It now has 512 numbers, and it meets the latents directly.
#
# The values work in the same way. The weighted sum of `W_V @ c` is `W_V` times the weighted sum of `c`.

# %%
q_absorbed = torch.einsum("hk,hkr->hr", q_content, W_K)  # [H, 512]
scores_2 = q_absorbed @ c.T + q_position @ k.T
summed = torch.softmax(scale * scores_2, dim=-1) @ c  # [H, 512]: the weighted sum of latents
latent_out = torch.einsum("hvr,hr->hv", W_V, summed)
print("largest difference:", f"{(latent_out - plain_out).abs().max():.0e}")

# %% [markdown]
# Equal up to the rounding of float64. And nothing but `c` and `k` was read: 512 + 64 = 576 numbers per token, **shared
# by all heads**.
#
# ## The call
#
# The middle two lines of that cell are what this library computes. Put query and cache together as 576 numbers, and
# call it. (`block_tables` says where the tokens lie; the next notebook draws it. Here they lie in one page.)

# %%
query = torch.cat([q_absorbed, q_position], dim=-1)[None, None]  # [1 request, 1 token, H, 576]
cache = torch.cat([c, k], dim=-1)[None]  # [1 page, n slots, 576]
out = mla.trtllm_batch_decode_with_kv_cache_mla(
    query=query,
    kv_cache=cache,
    workspace_buffer=None,
    qk_nope_head_dim=128,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    block_tables=torch.tensor([[0]]),
    seq_lens=torch.tensor([n]),
    max_seq_len=n,
    bmm1_scale=scale,
    out=torch.empty(1, 1, H, 512),
)
print("shape of the output:", list(out.shape))
print("largest difference: ", f"{(out[0, 0] - summed).abs().max():.0e}", "(the output is float32)")

# %% [markdown]
# ## What it saves
#
# The bars are bytes per token and layer, on a scale where each step is a factor of ten.

# %%
figure, axes = plt.subplots(figsize=(7, 2.2))
sizes = {
    "128 heads, bf16": plain,
    "8 groups of heads, bf16": 8 * (192 + 128) * 2,
    "one latent, bf16": 576 * 2,
    "one latent, fp8": 576,
}
bars(axes, sizes, title="cache of one token in one layer", unit="bytes", log=True)
plt.show()

# %% [markdown]
# There is a second gain. All 128 heads read the *same* 576 numbers. A GPU loads them once and uses them 128 times. So
# the new work per byte is large, and decode attention, which for plain attention waits for memory, can be limited by
# arithmetic instead. Notebook 11 puts numbers on that.
#
# ## Exercises
#
# **1.** How many bytes does a token cost in one layer with a latent in bf16 (2 bytes per number)?

# %%
check("01-bytes", None)

# %% [markdown]
# **2.** How many times fewer is that than the 128 heads in bf16 need? Give the whole number, rounded down.

# %%
check("01-ratio", None)

# %% [markdown]
# **3.** Why does the position key not go into the latent as well? One word of the three is right:
#
# * `"size"`: 64 numbers are too few to be worth it.
# * `"rotation"`: the key is rotated by its token's position, so the matrix between query and latent would differ from
#   token to token, and the query could not absorb it once.
# * `"precision"`: the position must be stored in more bits.

# %%
check("01-position", None)

# %% [markdown]
# **4.** Write the absorption yourself, without `einsum` if you like.


# %%
def absorb(q_content, W_K):
    """q_content [H, 128] and W_K [H, 128, R] -> [H, R]."""
    return None


check("01-absorb", absorb)
