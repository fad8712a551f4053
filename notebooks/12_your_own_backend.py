# %% [markdown]
# # 12. Your own backend, before the oracle
#
# **The one idea of this notebook:** a backend is an object with a name, an honest list of what it can do, and one
# method that computes. Everything else is there already: checks, dispatch, explanations, tests.

# %%
import math

import torch
from exercises import check
from pictures import GREEN, GREY, ORANGE, plt

import mla
from mla.testing import Case, Profile, build, judge_kernel

# %% [markdown]
# ## The kernel
#
# A backend gets a `mla.Problem`. Everything in it is checked already. This kernel is plain PyTorch, and does one query
# token per request. It writes every element of `out` [B, Q, H, R] and, if asked for, of `lse` [B, Q, H].


# %%
def first_try(p, out, lse):
    for b in range(p.batch):
        n = int(p.seq_lens[b])
        pages = p.block_tables[b].long()  # all the pages of the row
        keys = p.kv_cache[pages].flatten(0, 1)[:n].float()  # [n, D]
        z = p.bmm1_scale * (p.query[b, 0].float() @ keys.T)  # [H, n]
        out[b, 0] = p.bmm2_scale * (z.softmax(dim=-1) @ keys[:, : p.kv_lora_rank])
        if lse is not None:
            lse[b, 0] = z.logsumexp(dim=-1) / math.log(2)


# %% [markdown]
# ## The object
#
# `capabilities` says what the kernel claims. `refusals` makes full sentences of it, so that whoever calls is told why
# the backend does not take a problem. Only claim what is true.


# %%
class Plain:
    name = "plain"
    capabilities = mla.Capabilities(
        dtype_pairs=frozenset({(torch.bfloat16, torch.bfloat16)}),
        device_types=("cpu",),
        sparse=False,
        sinks=False,
        max_q_len=1,
    )

    def __init__(self, kernel):
        self.kernel = kernel

    def why_not(self, problem):
        return self.capabilities.refusals(problem)

    def run(self, problem, out, lse):
        self.kernel(problem, out, lse)


mla.register_backend("plain", Plain(first_try))
print(list(mla.backends()))

# %% [markdown]
# ## Called by name
#
# Now the library knows it. A problem beyond its claims is refused before anything runs.

# %%
call = build(Case(lengths=(5, 64), heads=4, table_slack=0)).arguments
out, lse = mla.trtllm_batch_decode_with_kv_cache_mla(**call, backend="plain")
print(list(out.shape), out.dtype)
two_tokens = build(Case(lengths=(5, 9), q_len=2, heads=4, sinks="normal")).arguments
try:
    mla.trtllm_batch_decode_with_kv_cache_mla(**two_tokens, backend="plain")
except mla.BackendUnsupported as error:
    print(error)

# %% [markdown]
# ## Before the oracle
#
# Is it right? The oracle goes through the contract, property by property, within what the kernel claims. (`mla check`
# does the same from a shell.) Its cases are hostile: tables have wild numbers behind the last page, unread slots hold
# NaN, lengths are 0.


# %%
def plain(**arguments):
    return mla.trtllm_batch_decode_with_kv_cache_mla(**arguments, backend="plain")


profile = Profile(pairs=(("bfloat16", "bfloat16"),), sparse=False, sinks=False, max_q_len=1)


def before_the_oracle(title):
    findings = [f for f in judge_kernel(plain, profile, examples=0, shrinking=True) if f.judged]
    _, axes = plt.subplots(figsize=(8, 0.19 * len(findings) + 0.5))
    for y, finding in enumerate(findings):
        right = finding.judged - finding.failed
        axes.barh(y, right, color=GREEN)
        axes.barh(y, finding.failed, left=right, color=ORANGE)
    axes.set_yticks(range(len(findings)), [finding.name for finding in findings], fontsize=7)
    axes.set(title=f"{title}: cases by property (green: right, orange: wrong)", ylim=(len(findings) - 0.4, -0.6))
    axes.grid(axis="x", color=GREY, linewidth=0.5)
    plt.show()
    return [finding for finding in findings if finding.verdict == "fails"]


failed = before_the_oracle("first try")

# %% [markdown]
# Most is right. Where something is wrong, the oracle makes the first failing case as small as it can, and says what
# happened there.

# %%
for finding in failed:
    print(f"{finding.name}: {finding.sentence}")
    print(f"    smallest case: {finding.failure.smallest}")
    print(f"    {finding.failure.text.splitlines()[0][:110]}\n")

# %% [markdown]
# Two faults come out.
#
# 1. The kernel looks up *every* column of the table. Behind the last page a column may hold anything, -1 or 2^31 - 1.
#    Only the first `ceil(n / P)` columns count.
# 2. The lse must have the base that was asked for. That is 2 unless somebody says otherwise, and here somebody did.
#
# ## Second try


# %%
def second_try(p, out, lse):
    for b in range(p.batch):
        n = max(int(p.seq_lens[b]), 0)
        pages = p.block_tables[b, : math.ceil(n / p.page_size)].long()  # what lies behind must not be read
        keys = p.kv_cache[pages].flatten(0, 1)[:n].float()  # [n, D]
        z = p.bmm1_scale * (p.query[b, 0].float() @ keys.T)  # [H, n]
        out[b, 0] = p.bmm2_scale * (z.softmax(dim=-1) @ keys[:, : p.kv_lora_rank])  # no key: zeros
        if lse is not None:
            natural = z.logsumexp(dim=-1)  # no key: -inf
            lse[b, 0] = natural / math.log(2) if p.lse_base == "base2" else natural


mla.register_backend("plain", Plain(second_try), replace=True)
failed = before_the_oracle("second try")
print("properties that fail:", [finding.name for finding in failed])

# %% [markdown]
# Everything that it claims holds. What it does not claim was not judged: that is what `capabilities` and `profile` are
# for. A kernel grows by claiming more.
#
# Is it quick? No: it reads lengths on the host, and walks over requests one by one. But it is right, and a right kernel
# is what one compares the quick one with.
#
# ## On to the real thing
#
# `CONTRIBUTING.md` has the ten steps that make a package of this, found by `mla` once it is installed.
#
# ## Exercises
#
# **1.** `backend="auto"` and a registered backend that accepts the problem: who runs on a CPU? Write the name.

# %%
check("12-auto", None)

# %% [markdown]
# **2.** A backend called by name refuses. What happens? One of `"falls back"`, `"raises"`, `"warns"`.

# %%
check("12-refused", None)

# %% [markdown]
# **3.** Let the kernel do several query tokens. Write it as a function of the call's arguments (`query`, `kv_cache`,
# `block_tables`, `seq_lens`, `bmm1_scale`, `bmm2_scale` and the others) that returns `out` in bf16. The check brings it
# before the oracle with Q = 1, 3 and 4, and with a request shorter than Q.


# %%
def several(*, query, kv_cache, block_tables, seq_lens, bmm1_scale, bmm2_scale, **others):
    """out [B, Q, H, 512] in bf16."""
    return None


check("12-several", several)
