"""Decode with one attention layer of DeepSeek-V3 from a paged cache, and hold every token to float64.

Prints errors and costs and draws them. Ends with status 1 if a token's error is above its budget.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from mla.cli.devices import failure
from mla.cli.problems import positive

OPTIONS = ("tokens", "steps", "picture", "seed", "device", "small")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # What is not given is not passed on: the demo's own defaults hold.
    add = parser.add_argument
    suppress = argparse.SUPPRESS
    add("--tokens", type=positive, default=suppress, metavar="N", help="tokens in the cache before the first step")
    add("--steps", type=positive, default=suppress, metavar="N", help="decode steps")
    add("--seed", type=int, default=suppress, metavar="N", help="seed of the weights and the hidden states")
    add(
        "--device",
        type=usable_device,
        default=suppress,
        metavar="DEVICE",
        help="such as cpu or cuda:0; it needs float64",
    )
    add("--small", action="store_true", default=suppress, help="a small layer: a few seconds")
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument("--picture", type=writable, default=suppress, metavar="FILE", help="the PNG file to draw")
    picture.add_argument(
        "--no-picture", dest="picture", action="store_const", const=None, default=suppress, help="draw none"
    )


def run(arguments: argparse.Namespace) -> int:
    from mla.demo.run import run_demo

    return run_demo(**{name: value for name, value in vars(arguments).items() if name in OPTIONS})


def usable_device(text: str) -> str:
    """An argparse type: a device on which this PyTorch can put a tensor."""
    try:
        torch.zeros(1, dtype=torch.float64, device=text).item()  # read back: "meta" holds no numbers
    except Exception as error:  # PyTorch raises many kinds here
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used here ({failure(error)})") from error
    return text


def writable(text: str) -> str:
    """An argparse type: a file name in a folder that exists."""
    if not Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is in no folder that exists")
    return text
