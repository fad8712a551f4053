# %% [markdown]
# # 10. The oracle as a game
#
# Here are eight kernels. Each has one fault. You may call them as often as you like, with whatever you like, and there
# is a judge who says whether an answer is right. Name the faults.
#
# **The one idea of this notebook:** a test is a question that only a right kernel answers rightly. Good questions
# differ in *one* thing, so that a wrong answer points at it.

# %%
from broken_kernels import SUSPECTS, kernels, sentence
from exercises import check
from pictures import GREEN, ORANGE, cells, plt

from mla.testing import Case, Mismatch, assert_close, build

# %% [markdown]
# ## The suspects
#
# Twenty faults. Eight of them are at work, each in one kernel.

# %%
for name in SUSPECTS:
    print(f"{name}\n    {sentence(name)}")

# %% [markdown]
# ## The judge
#
# A `Case` describes a call in a few words, `build` makes it, and `assert_close` judges the result against float64 with
# a budget that follows from the number formats (notebook 7). In the calls that `build` makes, everything that must not
# be read is NaN.


# %%
def judge(kernel, case):
    """None if the answer is right, else what is wrong, in words."""
    call = build(case)
    try:
        assert_close(call.run(kernel), call.problem)
    except Mismatch as mismatch:
        return str(mismatch)
    return None


# %% [markdown]
# ## A first round of questions
#
# The first question is the plainest there is: one request, one token in the cache, one page. Each of the others changes
# one thing. `page_size` is 64 unless it says something else, and `out` is bf16.

# %%
questions = {
    "one key": Case(lengths=(1,)),
    "one key, no lse": Case(lengths=(1,), lse="none"),
    "64 keys": Case(lengths=(64,)),
    "5 keys": Case(lengths=(5,)),
    "5 keys, all equal": Case(lengths=(5,), scores="equal", values="position"),
    "5 keys, page of 4": Case(lengths=(5,), page_size=4),
    "5 keys, Q = 3": Case(lengths=(5,), q_len=3),
    "5 keys, bmm2 = 3": Case(lengths=(5,), bmm2=3.0),
    "5 keys, a sink": Case(lengths=(5,), sinks="normal"),
    "5 keys, natural lse": Case(lengths=(5,), lse_base="basee"),
    "5 keys, no lse": Case(lengths=(5,), lse="none"),
    "a list": Case(lengths=(9,), top_k=5),
    "a list with -1": Case(lengths=(9,), top_k=5, slots="holes", seed=1),
    "a list, some twice": Case(lengths=(9,), top_k=5, slots="duplicates", seed=1),
}
suspects = kernels()
answers = {letter: [judge(kernel, case) for case in questions.values()] for letter, kernel in suspects.items()}

# %% [markdown]
# Green is right, orange is wrong. A column is a kernel, a row is a question.

# %%
figure, axes = plt.subplots(figsize=(6, 4))
table = list(zip(*answers.values(), strict=True))
cells(
    axes,
    [[GREEN if answer is None else ORANGE for answer in row] for row in table],
    [["" if answer is None else "wrong" for answer in row] for row in table],
    rows=list(questions),
    columns=list(answers),
    size=7,
)
axes.xaxis.tick_top()
plt.show()

# %% [markdown]
# Read it like a doctor. Two rows that differ in one thing, and only one of them is orange: there is your symptom. A
# column that is orange from the first row on has something wrong with a single key, where the only weight is 1. And
# the lse is judged too: the second row leaves it out.
#
# ## A closer look: a worked example
#
# The judge says more than "wrong". Here is a ninth kernel, whose fault we know: it leaves out the first key.

# %%
from mla.testing.faults import FAULTS

ninth = FAULTS["first-key-left-out"].make()
print(judge(ninth, Case(lengths=(1,))))

# %% [markdown]
# With a single key the output is zero: that key was not seen. Now a question made for reading: the query is zero, so
# the output is the mean of the keys that were seen, and key j holds the number j. Expected is (0 + 1 + 2 + 3 + 4) / 5
# = 2.

# %%
call = build(Case(lengths=(5,), scores="equal", values="position", out="float32"))
out, lse = call.run(ninth)
print("output:", out[0, 0, 0, 0].item(), " 2 ** lse:", round(2 ** lse[0, 0].item(), 3))

# %% [markdown]
# 2.5 is the mean of 1, 2, 3, 4. And 2 ** lse is the sum of the weights: 4 keys of weight 1. So key 0 is missing.
#
# ## Your turn
#
# Change this cell, run it again, ask better questions. All words that a `Case` knows are in `help(Case)`.

# %%
mine = Case(lengths=(5,), scores="equal", values="position", out="float32")
for letter, kernel in suspects.items():
    call = build(mine)
    out, lse = call.run(kernel)
    print(letter, "output:", round(out[0, 0, 0, 0].item(), 4), " 2 ** lse:", round(2 ** lse[0, 0].item(), 4))

# %% [markdown]
# ## Exercises
#
# Name the faults, by the names in the list of suspects.

# %%
check("10-A", None)
check("10-B", None)
check("10-C", None)
check("10-D", None)
check("10-E", None)
check("10-F", None)
check("10-G", None)
check("10-H", None)

# %% [markdown]
# ## And then
#
# `mla.testing.faults` has more than 150 faults, and `mla check` brings a kernel before every property of the contract.
# The page `docs/kill_matrix.md` shows which property notices which fault. Each property is a question like yours.
