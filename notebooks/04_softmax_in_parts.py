# %% [markdown]
# # 4. Softmax in parts
#
# A request may have 100,000 tokens. No part of a GPU holds 100,000 scores at once, and one part alone would be too
# slow. So the keys are cut: one block after the other, and many parts of the GPU side by side.
#
# **The one idea of this notebook:** attention over some of the keys can be kept as a pair (out, lse), and two pairs can
# be merged into the pair of all their keys, exactly.

# %%
import math

import torch
from exercises import check
from pictures import BLUE, GREEN, GREY, ORANGE, plt

import mla

# %% [markdown]
# ## First trouble: exp overflows
#
# Softmax divides `exp(z)` by the sum of all `exp(z)`. In float32, `exp(89)` is infinity.

# %%
z = torch.tensor([88.0, 95.0, 93.0])
print("as written:          ", torch.exp(z) / torch.exp(z).sum())
top = z.max()
print("less the largest one:", torch.exp(z - top) / torch.exp(z - top).sum())

# %% [markdown]
# Taking the largest score off changes nothing in the quotient, and all exponents are at most 0. But now one must know
# the largest score, so one must have seen all. Or must one?
#
# ## Online softmax
#
# Walk over the blocks. Keep three things: the largest score so far `top`, the sum of weights `total`, and the weighted
# sum of values `sums`. Weights are relative to `top`. When a later block has a larger score, what was summed before is
# too large by a known factor: multiply it by `exp(old top - new top)`.


# %%
def online(z, values, block):
    """z [n] scores, values [n, R] -> out [R], lse, and the history of `top`."""
    top, total, sums, history = torch.tensor(-math.inf), torch.tensor(0.0), torch.zeros(values.shape[1]), []
    for start in range(0, len(z), block):
        part, part_values = z[start : start + block], values[start : start + block]
        higher = torch.maximum(top, part.max())
        rescale = torch.exp(top - higher)
        weights = torch.exp(part - higher)
        total = total * rescale + weights.sum()
        sums = sums * rescale + weights @ part_values
        top = higher
        history.append((float(top), float(rescale), float(total)))
    return sums / total, top + torch.log(total), history


random = torch.Generator().manual_seed(32)
z = 4 * torch.randn(96, generator=random)
values = torch.randn(96, 8, generator=random)
out, lse, history = online(z, values, block=8)
exact = torch.softmax(z.double(), 0) @ values.double()
print("largest error:", f"{(out - exact).abs().max():.0e}", " lse error:", f"{abs(lse - z.double().logsumexp(0)):.0e}")

# %% [markdown]
# The picture shows the walk: scores as dots, the largest so far as a line. Where the line rises, the sums are scaled
# down. That happens a few times at the beginning and more and more seldom later.

# %%
figure, axes = plt.subplots(figsize=(8, 2.6))
axes.plot(z, ".", color=GREY, label="scores")
axes.step([8 * i for i in range(13)], [history[0][0]] + [h[0] for h in history], color=BLUE, label="largest so far")
for i, (_, rescale, _) in enumerate(history[1:], start=1):
    if rescale < 1:
        axes.annotate(f"x {rescale:.2f}", (8 * i, history[i][0]), (8 * i + 0.5, history[i][0] + 0.8), color=ORANGE)
axes.set(xlabel="key", ylabel="score", ylim=(-13, 16), title="online softmax over blocks of 8 keys")
axes.legend(loc="lower right", frameon=False, ncols=2)
plt.show()

# %% [markdown]
# ## Second trouble: one walker is slow
#
# Let four walkers take a quarter of the keys each. Each one returns its own (out, lse). `lse` is the logarithm of its
# sum of weights, so it says how much the walker's output should count:
#
# $$ \text{lse} = \log(e^{\text{lse}_a} + e^{\text{lse}_b}) \qquad
#    \text{out} = e^{\text{lse}_a - \text{lse}}\,\text{out}_a + e^{\text{lse}_b - \text{lse}}\,\text{out}_b $$
#
# `mla.merge_states` does that for any number of parts. Outputs are [parts, heads, R] there; we have one head.

# %%
parts = [online(z[i : i + 24], values[i : i + 24], block=8)[:2] for i in range(0, 96, 24)]
outs = torch.stack([part[0] for part in parts])[:, None]  # [4, 1 head, 8]
lses = torch.stack([part[1] for part in parts])[:, None]  # [4, 1 head]
merged, merged_lse = mla.merge_states(outs, lses, lse_base="basee")
print("largest error of the four merged:", f"{(merged[0] - exact).abs().max():.0e}")
counts = torch.exp(lses[:, 0] - merged_lse[0]).tolist()
print("how much each part counts:", ", ".join(f"{count:.1%}" for count in counts))

# %% [markdown]
# The mean of the four outputs would be wrong: the parts do not count the same.
#
# ## The algebra
#
# Merging behaves like addition. The order does not matter, the grouping does not matter, and there is a zero: the pair
# `out = 0, lse = -inf` of a part without keys. That is why the call returns just that for an empty row. A *sink* is a
# pair too, with `out = 0` and the sink as its lse.

# %%
a, b, c = ((outs[i], lses[i]) for i in range(3))
zero = (torch.zeros(1, 8), torch.full((1,), -math.inf))


def merge(x, y):
    return mla.merge_state(*x, *y, lse_base="basee")


def apart(x, y):
    return f"{max((x[0] - y[0]).abs().max(), (x[1] - y[1]).abs().max()):.0e}"


print("a + b   and  b + a:        ", apart(merge(a, b), merge(b, a)))
print("(a + b) + c  and  a + (b + c):", apart(merge(merge(a, b), c), merge(a, merge(b, c))))
print("a + 0   and  a:            ", apart(merge(a, zero), a))

# %% [markdown]
# ## The same with the call
#
# Give half of the pages to one call and half to another, as two GPUs would, and merge. The call's lse has base 2
# unless one asks otherwise, since GPUs compute powers of 2. `merge_state` expects base 2 as well.

# %%
cache = torch.randn(4, 16, 576, generator=random)
call = dict(query=torch.randn(1, 1, 2, 576, generator=random), kv_cache=cache, workspace_buffer=None)
call |= dict(qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, max_seq_len=64, bmm1_scale=192**-0.5)
call |= dict(return_lse=True)


def attend(pages):
    tables, lengths = torch.tensor([pages]), torch.tensor([16 * len(pages)])
    out = torch.empty(1, 1, 2, 512)
    return mla.trtllm_batch_decode_with_kv_cache_mla(**call, block_tables=tables, seq_lens=lengths, out=out)


whole = attend([0, 1, 2, 3])
halves = mla.merge_state(*attend([0, 1]), *attend([2, 3]))
print("out:", f"{(whole[0] - halves[0]).abs().max():.0e}", " lse:", f"{(whole[1] - halves[1]).abs().max():.0e}")

# %% [markdown]
# What does cutting cost? Each part writes 512 numbers and one lse per row, and somebody reads them again. So one cuts
# as often as it takes to keep the GPU busy, and no more. The picture has the time of one long request on 8 walkers, in
# units of one block of keys, if merging a part takes as long as 4 blocks.

# %%
splits = torch.arange(1, 33)
walk = torch.ceil(256 / splits) * torch.ceil(splits / 8)
cost = torch.where(splits > 1, 4.0 * splits, 0.0)
figure, axes = plt.subplots(figsize=(8, 2.4))
axes.bar(splits, walk, color=BLUE, label="walking, 8 at a time")
axes.bar(splits, cost, bottom=walk, color=GREEN, label="merging")
axes.set(xlabel="parts", ylabel="time", title="one request of 256 blocks on 8 walkers")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Exercises
#
# **1.** Two parts have lse 3 each, to base 2. What is the lse of both together?

# %%
check("04-two-parts", None)

# %% [markdown]
# **2.** A part with out = 6 and lse = 1 (base 2) is merged with a part with out = 3 and lse = 0. What is the output?

# %%
check("04-weights", None)

# %% [markdown]
# **3.** A kernel cuts each row into four parts and adds the sink in every part before merging. How many times does the
# sink count in the result?

# %%
check("04-sink", None)

# %% [markdown]
# **4.** Write the merge of two pairs with base 2. Mind scores that are far apart, and a part without keys.


# %%
def my_merge(out_a, lse_a, out_b, lse_b):
    """out [H, R] and lse [H], twice -> (out, lse)."""
    return None


check("04-merge", my_merge)
