"""The emulator's primitives are what the PTX ISA says of them: brute force by its tables, torch's own arithmetic."""

from pathlib import Path

import pytest
import torch

from emulated import COMPILER, EmulatedLauncher, EmulatorError
from llmcompress.kernels.launch import Kernel, Launch

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")
PROBES = Path(__file__).parent / "probes"
DTYPES = [torch.float16, torch.bfloat16]


def probe(name, *arguments, threads=32, blocks=1, shared=0, seed=0, overlaps=False, **defines):
    kernel = Kernel("probes.cu", f"probe_{name}", tuple(sorted(defines.items())))
    launcher = EmulatedLauncher(seed=seed, csrc=PROBES)
    launcher(Launch(kernel, (blocks, 1, 1), (threads, 1, 1), shared, overlaps), *arguments)
    assert len(launcher.launches) == 1


def words(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)


def bfloat(dtype):
    return {"BFLOAT": 1} if dtype == torch.bfloat16 else {}


def test_lop3_follows_its_table():
    a, b, c = words(32, 1), words(32, 2), words(32, 3)
    d = torch.zeros(4, 32, dtype=torch.int32)
    probe("lop3", a, b, c, d)
    for table, row in zip((0xC0, 0xEA, 0x96, 0xCA), d.tolist(), strict=True):
        for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), row, strict=True):
            places = [4 * (x >> i & 1) + 2 * (y >> i & 1) + (z >> i & 1) for i in range(32)]
            assert got & 0xFFFFFFFF == sum((table >> place & 1) << i for i, place in enumerate(places))


def test_prmt_takes_bytes_and_signs():
    a, b, selectors = words(64, 1), words(64, 2), words(64, 3)
    d = torch.zeros(64, dtype=torch.int32)
    probe("prmt", a, b, selectors, d, threads=64)
    bytes_of = torch.stack([a, b], 1).view(torch.uint8).tolist()
    for eight, selector, got in zip(
        bytes_of, selectors.tolist(), d.view(torch.uint8).view(64, 4).tolist(), strict=True
    ):
        nibbles = [selector >> 4 * i & 15 for i in range(4)]
        assert got == [(255 if eight[n & 7] > 127 else 0) if n & 8 else eight[n] for n in nibbles]


def test_dp4a_sums_products_of_signed_bytes():
    a, b, c = words(64, 1), words(64, 2), words(64, 3) // 4
    d = torch.zeros(64, dtype=torch.int32)
    probe("dp4a", a, b, c, d, threads=64)
    x, y = (t.view(torch.int8).view(64, 4).int() for t in (a, b))
    assert torch.equal(d, (x * y).sum(1, dtype=torch.int32) + c)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fma2_rounds_once(dtype):
    count = 4096
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randint(-32768, 32768, (count,), generator=generator).to(torch.int16) for _ in range(3))
    c[: count // 2] = (-(a.view(dtype).double() * b.view(dtype).double())).to(dtype).view(torch.int16)[: count // 2]
    d = torch.zeros(count, dtype=torch.int16)
    probe("fma2", *(t.view(torch.int32) for t in (a, b, c, d)), threads=512, blocks=4, **bfloat(dtype))
    for x, y, z, got in zip(*(t.view(dtype).tolist() for t in (a, b, c, d)), strict=True):
        expected = rounded_once(x, y, z, dtype)
        assert got == expected or (got != got and expected != expected)


def rounded_once(x, y, z, dtype):
    """x * y + z in exact fractions, rounded to even by bisecting all values of the type."""
    from fractions import Fraction
    from math import isfinite

    if not all(map(isfinite, (x, y, z))):
        return float(torch.tensor(x, dtype=torch.float64) * y + z)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    size, sign = abs(exact), -1.0 if exact < 0 else 1.0
    values = torch.arange(0x7C00 if dtype == torch.float16 else 0x7F80, dtype=torch.int16).view(dtype)
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if Fraction(float(values[middle])) <= size else (low, middle)
    below = Fraction(float(values[low]))
    step = below - Fraction(float(values[low - 1])) if low + 1 == len(values) else None
    above = below + step if step is not None else Fraction(float(values[low + 1]))
    up = size - below > above - size or (size - below == above - size and low % 2 == 1)
    if up and step is not None:
        return sign * float("inf")
    return sign * float(above if up else below)


@pytest.mark.parametrize("dtype", DTYPES)
def test_conversions_are_torchs(dtype):
    every = torch.arange(-32768, 32768).to(torch.int16).view(dtype).float()
    between = torch.cat(
        [every, torch.nextafter(every, every + 1), (every + every.roll(1)) / 2, words(512).view(torch.float32)]
    )
    count = between.numel() // 512 * 512
    x = between[:count].contiguous()
    y, back = torch.zeros(count, dtype=torch.int16), torch.zeros(count)
    probe("convert", x, y, back, threads=512, blocks=count // 512, **bfloat(dtype))
    expected = x.to(dtype)
    torch.testing.assert_close(y.view(dtype), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(back, expected.float(), rtol=0, atol=0, equal_nan=True)


def test_round_even_is_torchs_round():
    x = torch.cat([torch.arange(-16, 16) / 2, torch.linspace(-128, 128, 96)])
    y = torch.zeros(128, dtype=torch.int32)
    probe("round", x, y, threads=128)
    assert torch.equal(y, x.round().int())


def fragments(matrix, place, lanes_words, per_word):
    """Words [32, lanes_words] of a matrix by a formula of the ISA: place(lane, i) is (row, column) of element i."""
    out = torch.zeros(32, lanes_words * per_word, dtype=matrix.dtype)
    for lane in range(32):
        for i in range(lanes_words * per_word):
            out[lane, i] = matrix[place(lane, i)]
    return out.view(torch.int32)


def a_of_k16(lane, i):  # PTX ISA, figure "MMA .m16n8k16 fragment layout for matrix A with .f16 / .bf16 type"
    group, thread = lane >> 2, lane % 4
    row = group if i in (0, 1, 4, 5) else group + 8
    return row, thread * 2 + (i & 1) + (0 if i < 4 else 8)


def b_of_k16(lane, i):
    return (lane % 4) * 2 + (i & 1) + (0 if i < 2 else 8), lane >> 2


def c_of(lane, i):
    return (lane >> 2) + (0 if i < 2 else 8), (lane % 4) * 2 + (i & 1)


def a_of_tf32(lane, i):  # figure "MMA .m16n8k8 fragment layout for matrix A with .tf32 type"
    return (lane >> 2) + (0 if i in (0, 2) else 8), lane % 4 + (0 if i < 2 else 4)


def b_of_tf32(lane, i):
    return lane % 4 + 4 * i, lane >> 2


def a_of_k32(lane, i):  # figure "MMA .m16n8k32 fragment layout for matrix A with .u8 / .s8 type"
    group, thread = lane >> 2, lane % 4
    row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
    return row, thread * 4 + (i & 3) + (0 if i < 8 else 16)


def b_of_k32(lane, i):
    return (lane % 4) * 4 + (i & 3) + (0 if i < 4 else 16), lane >> 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_mma_of_16_bit_floats_multiplies_by_the_tables_of_the_isa(dtype):
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randint(-9, 10, shape, generator=generator).float() for shape in ((16, 16), (16, 8), (16, 8)))
    d, alone = torch.zeros(32, 4), torch.zeros(32, 4)
    inputs = fragments(a.to(dtype), a_of_k16, 4, 2), fragments(b.to(dtype), b_of_k16, 2, 2)
    probe("mma", *inputs, fragments(c, c_of, 4, 1).view(torch.float32), d, alone, **bfloat(dtype))
    assert torch.equal(d.view(torch.int32), fragments(a @ b + c, c_of, 4, 1))
    assert torch.equal(alone.view(torch.int32), fragments(a @ b, c_of, 4, 1))


def test_mma_cuts_what_float32_cannot_hold():
    a, b, c = torch.zeros(16, 16), torch.zeros(16, 8), torch.full((16, 8), 2.0**24)
    a[:, 0], b[0] = 1.0, 1.0
    a[:, 1], b[1] = 1.0, 0.75
    d = torch.zeros(32, 4)
    inputs = fragments(a.half(), a_of_k16, 4, 2), fragments(b.half(), b_of_k16, 2, 2)
    probe("mma", *inputs, fragments(c, c_of, 4, 1).view(torch.float32), d, torch.zeros(32, 4))
    assert (d == 2.0**24).all()  # 2^24 + 1.75 would round to 2^24 + 2


def test_mma_of_bytes_multiplies_by_the_tables_of_the_isa():
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-128, 128, (16, 32), generator=generator, dtype=torch.int8)
    b = torch.randint(-128, 128, (32, 8), generator=generator, dtype=torch.int8)
    c = torch.randint(-(2**20), 2**20, (16, 8), generator=generator, dtype=torch.int32)
    d = torch.zeros(32, 4, dtype=torch.int32)
    probe("mma_int8", fragments(a, a_of_k32, 4, 4), fragments(b, b_of_k32, 2, 4), fragments(c, c_of, 4, 1), d)
    assert torch.equal(d, fragments(a.int() @ b.int() + c, c_of, 4, 1))


def test_mma_of_tf32_takes_ten_bits_of_a_mantissa_by_the_tables_of_the_isa():
    generator = torch.Generator().manual_seed(0)
    shapes = (16, 8), (8, 8), (16, 8)
    a, b, c = (torch.randint(1024, 1400, shape, generator=generator).float() for shape in shapes)
    d = torch.zeros(32, 4)
    inputs = fragments(a + 0.75, a_of_tf32, 4, 1), fragments(b, b_of_tf32, 2, 1), fragments(c, c_of, 4, 1)
    probe("mma_tf32", *(words.view(torch.float32) for words in inputs), d)
    assert torch.equal(d.view(torch.int32), fragments((a.double() @ b.double() + c).float(), c_of, 4, 1))


def test_ldmatrix_gives_each_lane_two_neighbours_of_a_row():
    rows = words(128)
    d = torch.zeros(32, 4, dtype=torch.int32)
    probe("matrices", rows, d, shared=512)
    matrices = rows.view(torch.int16).view(4, 8, 8)
    for lane in range(32):
        for i in range(4):
            pair = matrices[i, lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2].contiguous()
            assert pair.view(torch.int32).item() == d[lane, i]


def test_shuffles_stay_in_their_warp():
    x, lanes = torch.arange(96.0), torch.randint(0, 32, (96,), dtype=torch.int32)
    chosen, crossed, down = torch.zeros(96), torch.zeros(96), torch.zeros(96)
    probe("shuffles", x, lanes, 5, chosen, crossed, down, threads=96)
    warp, lane = torch.arange(96) // 32 * 32, torch.arange(96) % 32
    assert torch.equal(chosen, x[warp + lanes])
    assert torch.equal(crossed, x[warp + (lane ^ 5)])
    assert torch.equal(down, x[warp + torch.where(lane + 5 < 32, lane + 5, lane)])


@pytest.mark.parametrize("count", [16, 6, 0])
def test_copies_arrive_once_waited_for(count):
    source, target = words(256), torch.full((256,), 7, dtype=torch.int32)
    probe("copy", source, target, count, 1, 1, threads=64, shared=1024)
    expected = source.view(torch.uint8).view(64, 16).flip(0).clone()
    expected[:, count:] = 0
    assert torch.equal(target.view(torch.uint8).view(64, 16), expected)


@pytest.mark.parametrize(("wait", "sync"), [(0, 1), (1, 0)])
def test_a_copy_not_waited_for_or_not_synchronised_is_found(wait, sync):
    source, target = torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    with pytest.raises(EmulatorError, match="races"):
        probe("copy", source, target, 16, wait, sync, threads=64, shared=1024)


def test_atomics_count_all_blocks():
    count, last = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    total = torch.zeros(1)
    probe("atomics", count, total, last, threads=64, blocks=7)
    assert (count.item(), total.item(), last.item()) == (7, 448.0, 7)


def joined(fault, seed):
    """Whether sums over blocks are right, and the counter zero again."""
    x, partial, y = torch.arange(64.0 * 5), torch.full((320,), torch.nan), torch.full((64,), torch.nan)
    counter = torch.zeros(1, dtype=torch.int32)
    probe("join", x, partial, counter, y, fault, threads=64, blocks=5, shared=16, seed=seed)
    return torch.equal(y, x.view(5, 64).sum(0)) and counter.item() == 0


def test_blocks_that_keep_to_the_protocol_see_one_anothers_sums():
    assert all(joined(0, seed) for seed in range(100))


@pytest.mark.parametrize("fault", [1, 2, 3, 5], ids=["no-release", "no-barrier", "no-acquire", "counter-left"])
def test_a_join_that_leaves_out_a_part_of_the_protocol_is_wrong(fault):
    assert not all(joined(fault, seed) for seed in range(100))


def test_reading_what_other_blocks_write_as_constant_is_found():
    with pytest.raises(EmulatorError, match="launch writes is read as if nothing wrote it"):
        joined(4, 0)


FAULTS = {
    1: "outside of every tensor",
    2: "outside of every tensor",
    3: "not aligned",
    4: "beyond the 256 bytes",
    5: "races",
    6: "wait for others",
    7: "wait for others",
    8: "races",
    9: "copies under way",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_mistakes_are_found(fault):
    x, y = words(64), torch.zeros(64, dtype=torch.int32)
    with pytest.raises(EmulatorError, match=FAULTS[fault]):
        probe("fault", x, y, fault, threads=64, shared=256)
    probe("fault", x, y, 0, threads=64, shared=256)
    assert torch.equal(x, y)


@pytest.mark.parametrize("fault", range(1, 6))
def test_memory_that_earlier_launches_may_still_write_is_left_alone(fault):
    x, y = words(256), torch.zeros(256, dtype=torch.int32)
    message = "outside of every tensor" if fault == 5 else "before earlier launches have ended"
    with pytest.raises(EmulatorError, match=message):
        probe("early", x, y, fault, threads=64, shared=1024, overlaps=True)
    probe("early", x, y, 0, threads=64, shared=1024, overlaps=True)
    assert torch.equal(x, y)


def test_arguments_of_the_wrong_kind_are_refused():
    x = words(32)
    with pytest.raises(EmulatorError, match="takes arguments ppi, not pif"):
        probe("fault", x, 3, 0.5)
