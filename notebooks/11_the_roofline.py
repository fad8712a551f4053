# %% [markdown]
# # 11. Reading a roofline
#
# How fast could a kernel be at best? A GPU can do two things: move bytes, and multiply. Both have a top speed.
#
# **The one idea of this notebook:** count the bytes and the operations that a problem cannot do without. The slower of
# the two sets the floor, and a time only means something beside its floor.

# %%
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from exercises import check
from pictures import COLOURS, GREY, plt

# %% [markdown]
# ## Counting
#
# One query vector and one key: 576 products for the score, 512 for the value. A product and a sum are two operations.
# The key has 576 numbers of 2 bytes, and *all* query vectors of a request share it.


# %%
def work(batch, length, heads, q_len=1, bytes_per_number=2):
    """(operations, bytes read from the cache)."""
    return batch * length * heads * q_len * 2 * (576 + 512), batch * length * 576 * bytes_per_number


for heads in (1, 16, 128):
    operations, size = work(1, 1000, heads)
    print(f"{heads:3} heads: {operations / size:6.1f} operations per byte")

# %% [markdown]
# Operations per byte is the *intensity*. It grows with the number of query vectors that share the keys, and it does not
# depend on the length.
#
# Plain multi-head attention has about 1: each head has keys of its own. So it always waits for memory. With a latent
# and 128 heads the intensity is some 240, and the arithmetic may be what limits. That is unusual for decoding.
#
# ## The roof
#
# At intensity x, memory of G bytes per second allows at most G * x operations per second, a line that rises. The
# arithmetic units allow at most T, a flat line. Both together look like a roof. The corner is at x = T / G.
#
# ## Measured numbers
#
# `mla bench` writes a JSON file: the two top speeds that were *measured* in that run, and a time for each case and
# kernel. This notebook reads the files in `benchmarks/results/bench`. If there is none, it makes one here and now,
# scaled down.

# %%
results = sorted(Path("..", "benchmarks", "results", "bench").glob("*.json"))
if results:
    print("reading", ", ".join(path.name for path in results))
    records = [json.loads(path.read_text()) for path in results]
else:
    print("no results of a GPU are here: running `mla bench --quick`")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "quick.json")
        options = ["--quick", "--cases", "tp8_b1*,dp_b*,sparse*", "--json", str(path)]
        subprocess.run([sys.executable, "-m", "mla", "bench", *options], check=True, capture_output=True)
        records = [json.loads(path.read_text())]

for record in records:
    ceilings = record["ceilings"]
    print(f"device: {record['about']['device']}, {len(record['rows'])} rows")
    print(f"    reads {ceilings['read_gbs']:,.0f} GB/s and computes {ceilings['bf16_tflops']:,.4g} TFLOPS in bf16")
    if record["scaled"]:
        print("    the cases are scaled down: these times show how to read the picture, and nothing about speed")

# %% [markdown]
# A row has no time if the kernel's answer was wrong. Nobody needs a quick wrong answer.

# %%
verdicts = {}
for record in records:
    for row in record["rows"]:
        verdicts[row["verdict"]] = verdicts.get(row["verdict"], 0) + 1
print(verdicts)

# %% [markdown]
# ## The picture
#
# Each dot is a case with one kernel. The higher, the quicker. How far a dot lies below the roof is what there is to
# gain. None can lie above it, but for a few percent: the roof is a measurement, too.

# %%
record = max(records, key=lambda one: (not one["scaled"], sum(row["best_us"] is not None for row in one["rows"])))
ceilings = record["ceilings"]
speed, top = ceilings["read_gbs"] * 1e9, ceilings["bf16_tflops"] * 1e12
bf16 = [row for row in record["rows"] if row["best_us"] and record["cases"][row["case"]]["dtype"] != "fp8"]
names = list(dict.fromkeys(row["contender"] for row in bf16))
lowest = min([row["flops"] / row["bytes"] for row in bf16] + [top / speed])
highest = max([row["flops"] / row["bytes"] for row in bf16] + [top / speed])
xs = [lowest / 2 * (4 * highest / lowest) ** (i / 60) for i in range(61)]

figure, axes = plt.subplots(figsize=(8, 3.6))
axes.plot(xs, [min(speed * x, top) / 1e12 for x in xs], color="black", label="roof")
axes.axvline(top / speed, color=GREY, linestyle="--")
for i, name in enumerate(names):
    mine = [row for row in bf16 if row["contender"] == name]
    x = [row["flops"] / row["bytes"] for row in mine]
    y = [row["flops"] / row["best_us"] / 1e6 for row in mine]
    axes.plot(x, y, ".", color=COLOURS[i % len(COLOURS)], label=name)
axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="10^12 operations per second")
axes.set_title(f"{record['about']['device']}: cases with a 16-bit cache")
axes.legend(frameon=False, loc="lower right")
plt.show()
print(f"the corner is at {top / speed:.0f} operations per byte")

# %% [markdown]
# Left of the corner a kernel waits for memory: fewer bytes help (fp8). Right of it the arithmetic waits: fewer bytes do
# not help at all, more heads per byte neither.
#
# ## Time over floor
#
# The same as one number per case: the measured time over the floor. 1 would be perfect. What keeps a kernel from it?
# Small cases do not fill the GPU, and starting a kernel takes microseconds whatever it does. Ragged batches leave parts
# of the GPU idle. And no kernel loads and multiplies all the time.

# %%
best = {}
for row in record["rows"]:
    if row["best_us"] and (row["case"] not in best or row["best_us"] < best[row["case"]]["best_us"]):
        best[row["case"]] = row
figure, axes = plt.subplots(figsize=(8, 0.2 * len(best) + 0.6))
ratios = [row["ratio_to_floor"] for row in best.values()]
axes.barh([f"{case} ({row['contender']})" for case, row in best.items()], ratios, color=COLOURS[0])
axes.axvline(1, color="black", linewidth=1)
axes.invert_yaxis()
axes.tick_params(axis="y", labelsize=7)
axes.set(xscale="log", title="quickest right kernel of each case: time over floor")
plt.show()

# %% [markdown]
# ## Exercises
#
# An imaginary GPU reads 4 TB/s (4 * 10^12 bytes per second) and does 800 TFLOPS (800 * 10^12 operations per second).
#
# **1.** At how many operations per byte is its corner?

# %%
check("11-corner", None)

# %% [markdown]
# **2.** 16 heads, one token per request, a cache in bf16. What limits: `"memory"` or `"arithmetic"`?

# %%
check("11-limit", None)

# %% [markdown]
# **3.** 128 heads and two tokens per request, bf16. And now?

# %%
check("11-limit-of-two", None)

# %% [markdown]
# **4.** 64 requests of 62,500 tokens, 16 heads, bf16. How many microseconds does it take at least to read the cache?
# (The cache has 64 * 62,500 * 576 numbers.)

# %%
check("11-floor", None)
