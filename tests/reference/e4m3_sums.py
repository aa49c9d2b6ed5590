#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The error of sums of products as Hopper's tensor cores add them in e4m3: the table of
docs/kernels.md#fp8.

  tests/reference/e4m3_sums.py

An instruction adds 32 products to its accumulator. All 33 are truncated to 13 bits of fraction of the
largest exponent among them, and so is their sum. The accumulator is added to fp32, and starts again at
zero, every so many elements of k. Needs NumPy."""

import numpy as np

DEPTH, FRACTION = 32, 13
SUMS = 4000


def e4m3(values):
    values = np.clip(values, -448, 448)
    unit = 2.0 ** (np.maximum(exponent(values), -6) - 3)
    return np.round(values / unit) * unit


def exponent(values):
    return np.where(values == 0, -1000, np.frexp(values)[1] - 1)


def truncate(values, of):
    """To FRACTION bits below the exponent `of`."""
    unit = 2.0 ** np.maximum(of - FRACTION, -1000.0)
    return np.trunc(values / unit) * unit


def add_products(sums, a, b):
    products = a * b
    of_products = np.maximum(exponent(a), -6) + np.maximum(exponent(b), -6)
    of_products = np.where(products == 0, -1000, of_products)
    largest = np.maximum(of_products.max(axis=1), exponent(sums))
    total = truncate(products, largest[:, None]).sum(axis=1) + truncate(sums, largest)
    return truncate(total, exponent(total))


def error(k, every):
    random = np.random.default_rng(1)
    a = e4m3(random.normal(0, 20, (SUMS, k)))
    b = e4m3(random.normal(0, 100, (SUMS, k)))
    total, sums = np.zeros(SUMS), np.zeros(SUMS)
    for begin in range(0, k, DEPTH):
        part = slice(begin, begin + DEPTH)
        sums = add_products(sums, a[:, part], b[:, part])
        if (begin + DEPTH) % every == 0 or begin + DEPTH == k:
            total, sums = total + sums, np.zeros(SUMS)
    exact = (a * b).sum(axis=1)
    return np.linalg.norm(total - exact) / np.linalg.norm(exact)


for k in (640, 5760):
    print(f"| k = {k} |", " | ".join(f"{error(k, every):.1e}" for every in (32, 128, 512, 1152, k)), "|")
