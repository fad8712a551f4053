# %% [markdown]
# # 9. A tensor-core kernel, lane by lane
#
# Below Triton there is a level where one writes what each *thread* does. 32 threads walk in step and are called a warp,
# each of them a lane. A tensor core multiplies for the whole warp at once: one instruction, 32 lanes, two matrices.
#
# **The one idea of this notebook:** a matrix that a tensor core takes lies in the registers of 32 lanes. Each lane
# holds a few numbers of it, and which ones is fixed by the instruction.
#
# The kernels of `backends/xqa` are written so, in Python, and compiled by Numba. Here they run in an emulator: every
# instruction for all lanes at once, in numpy, with every access checked. No GPU is needed, and no Numba.

# %%
import numpy as np
import torch
from exercises import check
from pictures import PALE, cells, plt

from mla.backends.xqa.config import Config
from mla.backends.xqa.emulator import fragments, picture
from mla.backends.xqa.emulator.backend import EmulatedBackend
from mla.backends.xqa.emulator.errors import EmulatorError
from mla.backends.xqa.emulator.launch import Grid, run_block, run_grid
from mla.backends.xqa.emulator.memory import GlobalMemory
from mla.backends.xqa.emulator.trace import Trace
from mla.backends.xqa.isa import (
    barrier,
    load_u32,
    mma_bf16,
    set_shared_i32,
    shared_base,
    shared_i32,
    store_f32,
    store_i32,
    thread_index,
)
from mla.backends.xqa.kernel.numbers import float32
from mla.testing import Case, Mismatch, assert_close, build

# %% [markdown]
# ## One instruction
#
# `mma.sync.m16n8k16` computes D = A B + C. A is 16 x 16 in bf16, B is 16 x 8 in bf16, C and D are 16 x 8 in float32.
#
# A register has 4 bytes. So a register holds two neighbouring bf16 numbers (a *word*), or one float32. A lane has four
# registers of A (a0 ... a3), two of B (b0, b1) and four of C (c0 ... c3). The picture says which lane holds what; the
# colour is the register.


# %%
def draw_fragment(axes, name, title):
    owners = [[cell.split(":") for cell in row] for row in picture.owners(name)]
    colours = [[PALE[int(register[1])] for _, register in row] for row in owners]
    cells(axes, colours, [[lane for lane, _ in row] for row in owners], title=title, size=7)
    axes.set_xticks([i + 0.5 for i in range(len(owners[0]))], range(len(owners[0])), fontsize=7)
    axes.set_yticks([i + 0.5 for i in range(len(owners))], range(len(owners)), fontsize=7)


figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10, 4))
draw_fragment(left, "A", "A: 16 rows x 8 words, lane")
draw_fragment(middle, "B", "B: 8 words x 8 columns, lane")
draw_fragment(right, "C", "C and D: 16 rows x 8 columns, lane")
plt.show()
print("colours:", ", ".join(f"{i}: {name}" for i, name in enumerate(("blue", "orange", "green", "pink"))))

# %% [markdown]
# Count the lanes as g = lane // 4 and t = lane % 4. Then c0 and c1 of a lane are row g, columns 2t and 2t + 1; c2 and
# c3 are the same columns in row g + 8. Four lanes share a row.
#
# ## A kernel with that one instruction
#
# It is a function of *one thread*. `thread_index()` says which. Addresses are bytes. Each lane loads its words of A and
# of B, asks for the product, and stores its four numbers.


# %%
def one_product(a, b, d):
    lane = thread_index()
    g = lane >> 2
    t = lane & 3
    upper = a + g * 32 + t * 4  # row g of A: 16 numbers of 2 bytes
    lower = a + (g + 8) * 32 + t * 4
    words_a = (load_u32(upper, 1), load_u32(lower, 1), load_u32(upper + 16, 1), load_u32(lower + 16, 1))
    column = b + g * 32 + t * 4  # B lies by columns: column g
    words_b = (load_u32(column, 1), load_u32(column + 16, 1))
    zero = float32(0.0)
    d0, d1, d2, d3 = mma_bf16(words_a, words_b, (zero, zero, zero, zero))
    to = d + g * 32 + t * 8  # row g of D: 8 numbers of 4 bytes
    store_f32(to, d0, 1)
    store_f32(to + 4, d1, 1)
    store_f32(to + 256, d2, 1)
    store_f32(to + 260, d3, 1)


def emulated(kernel, inputs, outputs, threads=32, shared_bytes=1024):
    """Run a kernel of ours in one block; arguments are the addresses of the tensors."""
    memory = GlobalMemory()
    for name, tensor in inputs.items():
        memory.add(name, tensor)
    for name, tensor in outputs.items():
        memory.add(name, tensor, writable=True)
    addresses = {name: tensor.data_ptr() for name, tensor in (inputs | outputs).items()}
    run_grid(Grid(kernel, Config(), addresses, 1, threads, shared_bytes), memory)


random = torch.Generator().manual_seed(0)
a = torch.randn(16, 16, generator=random).bfloat16()
b = torch.randn(8, 16, generator=random).bfloat16()  # [column, k]
d = torch.zeros(16, 8)
emulated(one_product, {"a": a, "b": b}, {"d": d})
print("largest error:", f"{(d - a.float() @ b.float().T).abs().max():.0e}")

# %% [markdown]
# ## The life of a tile
#
# Now the real kernel. 16 query vectors (one request, 16 heads) over 20 cached tokens, all in one page. A block has 8
# warps, and a tile has 32 tokens. We run the block that gets the work, and keep a trace: every instruction with its
# operands and results.

# %%
call = build(Case(lengths=(20,), heads=16))
problem = call.problem
out, lse = torch.empty(1, 1, 16, 512, dtype=torch.bfloat16), torch.empty(1, 1, 16)
emulation = EmulatedBackend().prepare(problem, out, lse)
traces = []
for block in range(emulation.decode.blocks):
    traces.append(Trace())
    run_block(emulation.decode, emulation.memory, block, trace=traces[-1])
trace = max(traces, key=len)
wanted = ("load_queries", "start_tile", "partial_scores", "softmax", "add_values", "finished")
for function, counts in trace.chapters():
    if function in wanted:
        print(f"{function:15}", ", ".join(f"{count} x {name}" for name, count in counts.items()))

# %% [markdown]
# These counts are per thread. The queries go into registers once (36 words each). Then the tile of keys is copied into
# shared memory (`cp_async16`: 16 bytes a time, without passing through registers). A second tile would be started next;
# there is none, so that group of copies is empty. Three steps follow.
#
# ### Scores
#
# `ldmatrix` loads matrices from shared memory and hands the words out to the lanes just as `mma` wants them. Each warp
# takes 16 tokens and a quarter of the 576 dimensions, in 9 steps. Each step ends in two products, for 8 tokens each.
# Here is the first product of warp 0, register c0 of its 32 lanes, drawn as g and t:

# %%
products = trace.of("mma_bf16", "partial_scores")
print(picture.lanes(products[0].result[0][:32]))
print("lane 5 gave a and b, two bf16 numbers in each register, and c, and got d:")
for name, registers in products[0].of_lane(5).items():
    form = "#010x" if name in "ab" else ".3f"
    print("   ", name, " ".join(format(register, form) for register in registers))

# %% [markdown]
# The last two of the 18 products hold each warp's finished sums. Put the lanes together to matrices, and add the four
# quarters of the dimensions: that must be q times k.

# %%
tile = np.zeros((16, 32))
for warp in range(8):
    lanes = slice(32 * warp, 32 * warp + 32)
    quarter, first_token = warp % 4, warp // 4 * 16
    for product, token in ((products[-2], first_token), (products[-1], first_token + 8)):
        tile[:, token : token + 8] += fragments.matrix_c([register[lanes] for register in product.result])
page = int(problem.block_tables[0, 0])
exact = problem.query[0, 0].double() @ problem.kv_cache[page, :20].double().T
print("largest error of the scores:", f"{np.abs(tile[:, :20] - exact.numpy()).max():.0e}")

# %% [markdown]
# Tokens 20 ... 31 of the tile lie past the length. They were never loaded: zeros stand in their place, and so their
# scores are 0. The next step makes them weigh nothing.
#
# ### Softmax
#
# 16 threads share a row. They find its highest score by `shuffle_xor`, which hands a number from lane to lane: four
# times, with the lane whose number differs in one bit. Then `exp2`, and two weights are packed into one register as
# bf16.
#
# ### Values
#
# The weights come back from shared memory as a *fragment A*. So the second product can begin. This draws what the
# lanes of warp 0 hold of them, as a matrix. Each warp has all the weights, and 64 of the 512 value dimensions.

# %%
loads = trace.of("ldmatrix_x4", "add_values")
weights = np.concatenate(
    [fragments.matrix_a([register[:32] for register in load.result], fragments.widen_bf16) for load in loads], axis=1
)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
for axes, matrix, title in ((left, tile, "scores [row, token]"), (right, weights, "weights [row, token]")):
    image = axes.imshow(matrix, aspect="auto", cmap="viridis")
    axes.axvline(19.5, color="white", linewidth=1)
    axes.set(title=title, xlabel="token of the tile", ylabel="row")
    figure.colorbar(image, ax=axes)
plt.show()
print("weights of tokens past the length:", np.unique(weights[:, 20:]).tolist())

# %% [markdown]
# The keys lie in shared memory by rows. As *values* they are needed by columns. `ldmatrix.trans` turns each 8 x 8
# matrix on its way into the registers. So each key is loaded once from global memory, and used twice.
#
# ## Before the oracle
#
# The emulator with the plan of a real GPU is a backend like any other.

# %%
backend = EmulatedBackend()
for case in (Case(lengths=(20, 70)), Case(lengths=(33,), q_len=2, heads=8, page_size=7)):
    call = build(case)
    p = call.problem
    out = torch.empty(p.batch, p.q_len, p.num_heads, 512, dtype=torch.bfloat16)
    lse = torch.empty(p.batch, p.q_len, p.num_heads)
    backend.run(p, out, lse)
    try:
        assert_close((out, lse), p)
        print("right:", case)
    except Mismatch as mismatch:
        print("WRONG:", case, mismatch)

# %% [markdown]
# ## What goes wrong at this level
#
# Warps do not wait for each other. What one writes into shared memory another may read only after a *barrier*. Forget
# it, and a GPU gives the right answer on most days. The emulator says so every time.


# %%
def hand_over(data):
    lane = thread_index()
    set_shared_i32(shared_base() + lane * 4, lane, 1)
    store_i32(data + lane * 4, shared_i32(shared_base() + (63 - lane) * 4), 1)


def hand_over_with_a_barrier(data):
    lane = thread_index()
    set_shared_i32(shared_base() + lane * 4, lane, 1)
    barrier()
    store_i32(data + lane * 4, shared_i32(shared_base() + (63 - lane) * 4), 1)


data = torch.zeros(64, dtype=torch.int32)
try:
    emulated(hand_over, {}, {"data": data}, threads=64)
except EmulatorError as error:
    print(error)
emulated(hand_over_with_a_barrier, {}, {"data": data}, threads=64)
print(data[:4].tolist(), "...", data[-1].item())

# %% [markdown]
# ## On a GPU
#
# The same source is compiled by Numba, and the instructions become PTX. With a GPU this cell runs both and compares.
# Without one it says what it skips.

# %%
if torch.cuda.is_available():
    import mla

    call = build(Case(lengths=(20, 70), lse="none"), "cuda")
    try:
        compiled = mla.trtllm_batch_decode_with_kv_cache_mla(**call.arguments, backend="xqa")
        assert_close(compiled.cpu(), build(call.case).problem)
        print("the compiled kernel on", torch.cuda.get_device_name(), "is right, too")
    except (mla.BackendUnsupported, mla.BackendBroken) as error:
        print(error)
else:
    print("no GPU here: skipped is the compiled kernel")

# %% [markdown]
# ## Exercises
#
# **1.** Which lane holds row 9, column 5 of D?

# %%
check("09-lane", None)

# %% [markdown]
# **2.** 16 query vectors of 576 dimensions meet 32 tokens, in bf16. How many m16n8k16 products does that take, in all
# warps together?

# %%
check("09-products", None)

# %% [markdown]
# **3.** The sums of 16 rows by 512 value dimensions stay in registers of 256 threads, in float32. How many registers is
# that for each thread?

# %%
check("09-registers", None)

# %% [markdown]
# **4.** Write the rule of fragment C as a function.


# %%
def owner(row, column):
    """(lane, i): register c_i of that lane holds row 0..15, column 0..7."""
    return None


check("09-owner", owner)
