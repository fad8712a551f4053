# %% [markdown]
# # 2. The paged cache, drawn
#
# A server holds many conversations at once. They have different lengths, they grow, and they end. Nobody knows
# beforehand how much room each will need.
#
# **The one idea of this notebook:** memory is cut into pages of equal size. A request takes any free page when it needs
# one, and a table remembers which pages it took, in order.

# %%
import torch
from exercises import check
from pictures import GREY, PALE, WHITE, cells, plt

import mla

# %% [markdown]
# ## A pool of pages
#
# Three requests with 5, 9 and 2 tokens. A page has room for 4. The letters are those used everywhere in this project:
# B requests, N pages in the pool, P slots in a page, W columns in the table.

# %%
P, N = 4, 8
lengths = torch.tensor([5, 9, 2], dtype=torch.int32)  # [B]
tables = torch.tensor([[6, 1, -1], [3, 0, 4], [2, -1, -1]], dtype=torch.int32)  # [B, W], -1: no page
cache = torch.full((N, P, 576), float("nan"))  # [N, P, 576]; NaN: nobody wrote here

# %% [markdown]
# `mla.append_tokens` writes the newest tokens of each request where the table says. Here all tokens of a request are
# new. Requests with fewer have theirs at the right end. Token j of request b is filled with the number 100 * b + j, so
# that one sees where it went.

# %%
longest = int(lengths.max())
latents = torch.zeros(3, longest, 576)
for b, length in enumerate(lengths.tolist()):
    for j in range(length):
        latents[b, longest - length + j] = 100 * b + j
mla.append_tokens(cache, tables, lengths, latents)
print(cache[:, :, 0])

# %% [markdown]
# The same as a picture: one row per page, one colour per request. Grey slots were never written. Note three things.
# Pages of a request lie anywhere. Its last page may be only partly full. And some pages belong to nobody.


# %%
def draw_pool(axes, tables, lengths):
    colours = [[GREY] * P for _ in range(N)]
    texts = [[""] * P for _ in range(N)]
    for b, length in enumerate(lengths.tolist()):
        for j in range(length):
            page, offset = int(tables[b, j // P]), j % P
            colours[page][offset], texts[page][offset] = PALE[b], f"{'ABC'[b]}{j}"
    cells(
        axes,
        colours,
        texts,
        rows=[f"page {i}" for i in range(N)],
        columns=[f"slot {i}" for i in range(P)],
        title="the pool, kv_cache [N, P, 576]",
    )


def draw_tables(axes, tables):
    colours = [[PALE[b] if page >= 0 else WHITE for page in row] for b, row in enumerate(tables.tolist())]
    texts = [[str(page) for page in row] for row in tables.tolist()]
    rows = [f"{'ABC'[b]}, length {length}" for b, length in enumerate(lengths.tolist())]
    columns = [f"tokens {P * i}-{P * i + P - 1}" for i in range(tables.shape[1])]
    cells(axes, colours, texts, rows=rows, columns=columns, title="block_tables [B, W] and seq_lens [B]")


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=[1.2, 1])
draw_tables(left, tables)
draw_pool(right, tables, lengths)
plt.show()

# %% [markdown]
# ## From a position to a place
#
# Token j of request b lies in column `j // P` of its table row, at offset `j % P` of that page. The whole pool seen as
# one long list has N * P *slots*, and the token's slot is `page * P + offset`. Token 6 of request B:

# %%
b, j = 1, 6
page, offset = int(tables[b, j // P]), j % P
print(f"column {j // P}, page {page}, offset {offset}, slot {page * P + offset}: it holds {cache[page, offset, 0]:.0f}")

# %% [markdown]
# ## A call over the ragged batch
#
# A query of zeros gives every visible token the same weight. So the output is the mean of what the request holds:
# 0 ... 4 for A, 100 ... 108 for B, 200 and 201 for C. The pool is full of NaN where nobody wrote, and none of it gets
# into the result.

# %%
call = dict(
    query=torch.zeros(3, 1, 1, 576),  # [B, 1 token, 1 head, 576]
    kv_cache=cache,
    workspace_buffer=None,
    qk_nope_head_dim=128,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    block_tables=tables,
    seq_lens=lengths,
    max_seq_len=9,
    out=torch.empty(3, 1, 1, 512),
)
print(mla.trtllm_batch_decode_with_kv_cache_mla(**call)[:, 0, 0, 0].tolist())

# %% [markdown]
# What the table holds past a length does not matter either. Put nonsense there: the bits stay the same.

# %%
before = mla.trtllm_batch_decode_with_kv_cache_mla(**call).clone()
nonsense = tables.clone()
nonsense[tables < 0] = 2**31 - 1
after = mla.trtllm_batch_decode_with_kv_cache_mla(**(call | {"block_tables": nonsense}))
print("the same bits:", torch.equal(before, after))

# %% [markdown]
# ## A wrong page
#
# A page that counts must lie in the pool. Lengths and pages are on the device, and a call does not wait to read them.
# While you debug, let it: strict mode names the row and the column.

# %%
broken = tables.clone()
broken[1, 2] = 8
try:
    with mla.strict():
        mla.trtllm_batch_decode_with_kv_cache_mla(**(call | {"block_tables": broken}))
except ValueError as error:
    print(error)

# %% [markdown]
# ## Growing
#
# One decode step adds one token to each request. A and C have room in their last pages. B has 9 tokens and room for 12.
# So no table changes here. When a page is full, the server writes a new page id into the next column, and that is all:
# nothing is copied.

# %%
lengths = lengths + 1
new = torch.tensor([5.0, 109.0, 202.0])[:, None, None].repeat(1, 1, 576)
mla.append_tokens(cache, tables, lengths, new)
figure, axes = plt.subplots(figsize=(4.5, 3.2))
draw_pool(axes, tables, lengths)
plt.show()

# %% [markdown]
# ## Exercises
#
# **1.** In the first picture, in which slot of the whole pool does token 8 of request B lie?

# %%
check("02-slot-of-8", None)

# %% [markdown]
# **2.** With pages of 64 slots, how many pages do requests of 1, 64, 65 and 130 tokens take together?

# %%
check("02-pages", None)

# %% [markdown]
# **3.** Those four requests waste slots, in their last pages. How many in all?

# %%
check("02-waste", None)

# %% [markdown]
# **4.** Write the step from a position to a slot.


# %%
def slot(tables, b, j, page_size):
    """The slot of token j of request b, an int."""
    return None


check("02-slot", slot)
