# %% [markdown]
# # 3. The call, argument by argument
#
# `mla.trtllm_batch_decode_with_kv_cache_mla` has a long name and twenty arguments. Each of them has a plain meaning.
#
# **The one idea of this notebook:** choose inputs so simple that the answer can be worked out by hand, and change one
# argument at a time.

# %%
import math

import torch
from exercises import check

import mla

# %% [markdown]
# ## A cache that one can calculate with
#
# One request with four tokens. Every number of token j's latent is `values[j]`. One head. Everything is small and
# exact.

# %%
values = torch.tensor([1.0, 2.0, 4.0, 9.0])
cache = torch.zeros(1, 4, 576)  # [N pages, P slots, D]
cache[0] = values[:, None]
base = dict(
    query=torch.zeros(1, 1, 1, 576),  # [B requests, Q tokens, H heads, D]
    kv_cache=cache,
    workspace_buffer=None,
    qk_nope_head_dim=128,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    block_tables=torch.tensor([[0]]),
    seq_lens=torch.tensor([4]),
    max_seq_len=4,
)


def run(**changes):
    """The call with some arguments changed; one number of the output stands for all, since they are equal."""
    result = mla.trtllm_batch_decode_with_kv_cache_mla(**(base | changes))
    if isinstance(result, tuple):
        out, lse = result
        return out[0, 0, 0, 0].item(), lse[0, 0].item()
    return result[0, 0, 0, 0].item()


# %% [markdown]
# ## query, kv_cache
#
# A score is the dot product of the query with a row of the cache. A query of zeros gives scores of zero, equal weights,
# and so the mean: (1 + 2 + 4 + 9) / 4.

# %%
print(run())

# %% [markdown]
# The cache row is key *and* value: the key is all 576 numbers, the value the first 512. To steer the scores without
# touching the values we use the last 64. Let the query ask for number 575 only, and let that number be ln 3 in token 1:
# its score is ln 3, its weight e^(ln 3) = 3, and the others weigh 1. The output is (1 + 3 * 2 + 4 + 9) / 6.

# %%
pointing = torch.zeros(1, 1, 1, 576)
pointing[..., 575] = 1.0
keyed = cache.clone()
keyed[..., 512:] = 0.0
keyed[0, 1, 575] = math.log(3)
print(run(query=pointing, kv_cache=keyed), "and by hand", (1 + 3 * 2 + 4 + 9) / 6)

# %% [markdown]
# The output is bf16, which keeps 8 binary digits: 3.328125 is the nearest to 3.3333. We come to `out` below.
#
# ## bmm1_scale
#
# It multiplies the scores. With 2 the score is 2 ln 3, and the weight is 9. A model passes 1 / sqrt(192) here, times
# the scales of quantised inputs.

# %%
print(run(query=pointing, kv_cache=keyed, bmm1_scale=2.0), "and by hand", (1 + 9 * 2 + 4 + 9) / 12)

# %% [markdown]
# ## bmm2_scale
#
# It multiplies the output, and nothing else.

# %%
print(run(bmm2_scale=0.5))

# %% [markdown]
# Both may be tensors of one float32 on the device. Then the kernel reads them when it runs, and a recorded CUDA graph
# follows when they change. The meaning is the same.

# %%
print(run(bmm2_scale=torch.tensor([0.5])))

# %% [markdown]
# ## seq_lens
#
# How many tokens the request has, the new one included. With 2, the mean of 1 and 2. With 0 there is nothing to see,
# and the output is 0.

# %%
print([run(seq_lens=torch.tensor([length])) for length in (0, 1, 2, 3, 4)])

# %% [markdown]
# ## max_seq_len
#
# A bound for the longest request. Kernels size things by it. It means nothing: any larger number gives the same result.

# %%
print(run(max_seq_len=4) == run(max_seq_len=100_000))

# %% [markdown]
# ## block_tables
#
# Which pages hold the request (notebook 2). Here with pages of 2 slots: the four tokens lie in pages 0 and 1. A table
# that lists page 1 twice sees 4, 9, 4, 9.

# %%
in_twos = cache.view(2, 2, 576)
print(run(kv_cache=in_twos, block_tables=torch.tensor([[0, 1]])))
print(run(kv_cache=in_twos, block_tables=torch.tensor([[1, 1]])))

# %% [markdown]
# ## sparse_mla_top_k
#
# 0 is dense: everything visible counts. With K > 0 each query token brings its own list of K *slots* in place of the
# table, [B, Q, K], and only those count. -1 fills a list up. Notebook 6 is about this.

# %%
print(run(sparse_mla_top_k=3, block_tables=torch.tensor([[[3, 0, -1]]])))

# %% [markdown]
# ## sinks
#
# One number per head: the score of a key that has no value. It takes weight away. A sink of ln 4 weighs 4, as much as
# our four tokens together, and so the output is halved: 16 / (4 + 4).

# %%
print(run(sinks=torch.tensor([math.log(4)])))

# %% [markdown]
# ## return_lse, return_lse_base
#
# The logarithm of the sum of all weights, the *log-sum-exp*. Four weights of 1: log2(4) = 2. Natural: ln 4. With the
# sink the sum is 8. It is what one needs to put partial results together (notebook 4).

# %%
print("base 2:", run(return_lse=True)[1])
print("base e:", round(run(return_lse=True, return_lse_base="basee")[1], 4))
print("with the sink:", run(return_lse=True, sinks=torch.tensor([math.log(4)]))[1])
print("nothing to see:", run(return_lse=True, seq_lens=torch.tensor([0]))[1])

# %% [markdown]
# ## out, lse
#
# Tensors of yours to be filled. The very same object comes back. Without `out` there is a new one in bf16. Yours may be
# float32, and then 20 / 6 shows more digits.

# %%
mine = torch.empty(1, 1, 1, 512)
back = mla.trtllm_batch_decode_with_kv_cache_mla(**(base | dict(query=pointing, kv_cache=keyed, out=mine)))
print(back is mine, mine[0, 0, 0, 0].item())

# %% [markdown]
# ## workspace_buffer, enable_pdl, deterministic
#
# Scratch memory; a way to start a kernel early; a promise about bits. None of them changes what the result means.

# %%
scratch = torch.randint(0, 256, (4096,), dtype=torch.uint8)
print(run(workspace_buffer=scratch), run(enable_pdl=True), run(deterministic=True))

# %% [markdown]
# ## backend
#
# Who computes. `"auto"` takes the first that can. A name runs or raises, and never falls back. `mla.explain` takes the
# same arguments, computes nothing, and tells.

# %%
print(str(mla.explain(**base)).splitlines()[1])

# %% [markdown]
# ## qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim
#
# 128, 512 and 64, the sizes of DeepSeek's attention. They are checked. An error names the argument, what was received
# and what was expected.

# %%
for changes in (dict(kv_lora_rank=576), dict(query=torch.zeros(1, 1, 576)), dict(seq_lens=torch.tensor([4.0]))):
    try:
        run(**changes)
    except (ValueError, TypeError) as error:
        print(f"{type(error).__name__}: {error}")

# %% [markdown]
# ## Exercises
#
# Work these out by hand first. Then check. Then run the call if you were wrong.
#
# **1.** `values` are 1, 2, 4, 9 and the query is zero. What is the output for `seq_lens` 3 with `bmm2_scale` 3?

# %%
check("03-scaled", None)

# %% [markdown]
# **2.** The query is zero and `seq_lens` is 2. What must the sink be so that the output is 1? Write the sum of weights
# that it must add (a whole number); the sink is its logarithm.

# %%
check("03-sink", None)

# %% [markdown]
# **3.** Two tokens have the scores ln 5 and ln 11. What is the lse to base 2?

# %%
check("03-lse", None)

# %% [markdown]
# **4.** The values are 1, 2, 4, 9, the query is zero, K is 4, and the list is `[3, 3, -1, 0]`. What is the output,
# rounded to two decimals?

# %%
check("03-list", None)
