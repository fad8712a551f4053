"""A DeepSeek-V3 attention layer at its true size, decoded through `mla` and compared with plain attention in float64.

`from mla.demo.run import run_demo` starts it. Nothing here is loaded by `import mla`. It needs PyTorch alone;
matplotlib adds the picture and rich the progress bar.
"""
