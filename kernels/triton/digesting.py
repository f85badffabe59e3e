"""The digest of a tensor's bytes: see `reference.digest` for the sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import words_of
from . import tiles
from .tiles import load


@triton.jit
def digest_terms(words, base, row, column):
    """v_i · (k_i | 1) of the words at i = base + row + column. -> int64

    k_i is a sum of three products: the parts of i that a thread's words share are multiplied once.
    """
    return term_of(words, _key(base) + _key(row) + _key(column))


@triton.jit
def term_at(words, position):
    """The same of words at any positions."""
    return term_of(words, _key(position))


@triton.jit
def term_of(words, k):
    v = words.to(tl.uint32, bitcast=True) + k
    v ^= v >> 15
    return (v.to(tl.uint64) * (k | 1).to(tl.uint64)).to(tl.int64)


@triton.jit
def _key(position):
    """k = position · 0x9E3779B1 mod 2^32. -> uint32"""
    return position.to(tl.uint32) * 0x9E3779B1


@triton.jit
def widened(bits):
    """Integers of 1, 2 or 4 bytes as words, without their signs. -> uint32"""
    if bits.dtype == tl.int16:
        bits = bits.to(tl.uint16, bitcast=True)
    return bits.to(tl.uint32)


@triton.jit(do_not_specialize=["numel", "first_tile"])
def digest_kernel(words, partial, numel, first_tile, TILE: tl.constexpr, FULL: tl.constexpr):
    tile = first_tile + tl.program_id(0).to(tl.int64)
    base = tile * TILE
    row, column = tl.arange(0, TILE // 4)[:, None] * 4, tl.arange(0, 4)[None, :]  # 16 bytes
    local = row + column
    there = None if FULL else local < numel - base
    terms = digest_terms(widened(load(words + base + local, there)), base, row, column)
    if not FULL:
        terms = tl.where(there, terms, 0)
    tl.store(partial + tile, tl.sum(terms))


def digest(data: Tensor) -> int:
    return digest_of(words_of(data))


def digest_of(words: Tensor) -> int:
    """The digest of integers of 1, 2 or 4 bytes, each of which is a word."""
    numel = words.numel()
    partial = torch.empty(tiles.count(numel), dtype=torch.int64, device=words.device)
    with tiles.on_device_of(words):
        for first, count, full in tiles.runs(0, tiles.count(numel), numel):
            tiles.launch(digest_kernel, count, words, partial, numel, first, tiles.TILE, full)
    return unsigned(int(partial.sum()))


def unsigned(total: int) -> int:
    return total & 0xFFFF_FFFF_FFFF_FFFF
