"""Packed words equal those of other packers: of GPTQModel 7.7.0, AutoAWQ 0.2.9 and compressed-tensors 0.20.0."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmcompress.packing.awq import pack_awq, unpack_awq
from llmcompress.packing.bits import pack, unpack, words_for


def words(text: str) -> torch.Tensor:
    """One row of int32 words from unsigned hexadecimal ones."""
    return (
        torch.tensor([[int(word, 16) for word in text.split()]], dtype=torch.int64).to(torch.uint32).view(torch.int32)
    )


def pattern(rows: int, columns: int, bits: int) -> torch.Tensor:
    """q[n, k] = (3k + 5n + 1) mod 2^bits."""
    n, k = torch.arange(rows).view(-1, 1), torch.arange(columns)
    return (3 * k + 5 * n + 1) % (1 << bits)


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        (4, pattern(8, 8, 4), "630da741 b852fc96 0da741eb 52fc9630 a741eb85 fc9630da 41eb852f 9630da74"),
        (2, pattern(8, 16, 2), "b1b1b1b1 c6c6c6c6 1b1b1b1b 6c6c6c6c b1b1b1b1 c6c6c6c6 1b1b1b1b 6c6c6c6c"),
        (
            8,
            (37 * torch.arange(4) + 11 * torch.arange(4).view(-1, 1) + 5) % 256,
            "744f2a05 7f5a3510 8a65401b 95704b26",
        ),
    ],
)
def test_one_word_of_every_gptq_column(bits, codes, expected):
    assert torch.equal(pack(codes, bits).t(), words(expected))


def test_three_bits_straddle_words_as_in_gptq():
    packed = pack(pattern(4, 32, 3), 3).t()
    assert torch.equal(packed[0:1], words("e1cc55e1 0e62af0e 73157873 98abc398"))
    assert torch.equal(packed[1:2], words("55e1cc55 af0e62af 78731578 c398abc3"))
    assert torch.equal(packed[2:3], words("cc55e1cc 62af0e62 15787315 abc398ab"))


@pytest.mark.parametrize(
    ("bits", "zeros", "v2", "v1"),
    [
        (4, 1 + torch.arange(8), "87654321", "76543210"),
        (2, 1 + torch.arange(16) % 3, "79e79e79", "24924924"),
        (8, 128 + torch.arange(4), "83828180", "8281807f"),
        (3, 1 + torch.arange(32) % 7, "1a3f58d1 fd6347eb 8d1fac68", "d11ac688 6b1a2358 688d6344"),
        (4, torch.full((8,), 8), "88888888", "77777777"),
        (8, torch.full((4,), 128), "80808080", "7f7f7f7f"),
        (2, torch.full((16,), 2), "aaaaaaaa", "55555555"),
    ],
)
def test_zero_points_in_both_conventions_of_gptq(bits, zeros, v2, v1):
    assert torch.equal(pack(zeros.view(1, -1), bits), words(v2))
    assert torch.equal(pack(zeros.view(1, -1) - 1, bits), words(v1))


def test_two_groups_of_gptq():
    codes = (7 * torch.arange(32) + 3 * torch.arange(8).view(-1, 1)) % 16
    packed = pack(codes, 4)
    assert torch.equal(packed[0:1], words("1a3c5e70 92b4d6f8 1a3c5e70 92b4d6f8"))
    assert torch.equal(packed[7:8], words("6f81a3c5 e7092b4d 6f81a3c5 e7092b4d"))


@pytest.mark.parametrize(
    ("bits", "signed", "rows"),
    [
        (4, torch.arange(-8, 8).view(2, 8), ["76543210", "fedcba98"]),
        (4, pattern(2, 12, 4) - 8, ["630da741 00002fc9", "b852fc96 0000741e"]),
        (8, torch.tensor([[-128, -1, 0, 127], [1, 2, 3, 4]]), ["ff807f00", "84838281"]),
        (2, (torch.arange(16) + torch.arange(2).view(-1, 1)) % 4 - 2, ["e4e4e4e4", "39393939"]),
        (3, pattern(2, 32, 3) - 4, ["e1cc55e1 55e1cc55 cc55e1cc", "0e62af0e af0e62af 62af0e62"]),
        # zero points, packed along the outputs: one row per group here
        (4, torch.stack([torch.arange(8) - 8, 7 - torch.arange(8)]), ["76543210", "89abcdef"]),
        (4, torch.arange(10).view(1, -1) - 4, ["ba987654 000000dc"]),
        # codes of the library's quantiser for a 2 x 8 matrix, symmetric and asymmetric by groups of 4
        (4, torch.tensor([[-4, 2, 1, 7, 2, -4, 6, -8], [0, 4, 7, 2, -8, 7, 1, -1]]), ["0e4af9a4", "79f0afc8"]),
        (4, torch.tensor([[-8, 0, -2, 7, 3, -3, 7, -8], [-8, 0, 7, -4, -8, 7, 1, -1]]), ["0f5bf680", "79f04f80"]),
    ],
)
def test_signed_codes_of_compressed_tensors(bits, signed, rows):
    expected = torch.cat([words(row) for row in rows])
    assert torch.equal(pack(signed + (1 << (bits - 1)), bits), expected)
    assert torch.equal(unpack(expected, bits, signed.shape[1]).to(torch.int64), signed + (1 << (bits - 1)))


def test_words_and_zero_points_of_awq():
    """q[k, n] = (n + 5k) mod 16 of 32 outputs, as AutoAWQ's WQLinear_GEMM packs them; zero points likewise."""
    codes = (torch.arange(32) + 5 * torch.arange(4).view(-1, 1)) % 16
    rows = ["75316420 fdb9eca8", "ca86b975 420e31fd", "1fdb0eca 97538642", "6420531f eca8db97"]
    assert torch.equal(pack_awq(codes), torch.cat([words(f"{row} {row}") for row in rows]))
    assert torch.equal(pack_awq(torch.full((1, 32), 8)), words("88888888 88888888 88888888 88888888"))


@given(st.integers(0, 4), st.integers(1, 9), st.integers(0, 2**32))
def test_unpacking_awq_gives_back_what_was_packed(rows, words_per_row, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, 8 * words_per_row), generator=generator, dtype=torch.uint8)
    packed = pack_awq(codes)
    assert packed.shape == (rows, words_per_row)
    assert torch.equal(unpack_awq(packed), codes)
    # the oracle: where each of eight neighbours lies in its word
    shifts = (0, 16, 4, 20, 8, 24, 12, 28)
    for row, stream in zip(codes.tolist(), packed.tolist(), strict=True):
        assert all(stream[n // 8] >> shifts[n % 8] & 15 == value for n, value in enumerate(row))


@given(st.data())
def test_unpacking_gives_back_what_was_packed(data):
    bits = data.draw(st.integers(1, 8))
    rows = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(1, 100))
    flat = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=rows * count, max_size=rows * count))
    codes = torch.tensor(flat, dtype=torch.uint8).view(rows, count)
    packed = pack(codes, bits)
    assert packed.shape == (rows, words_for(count, bits))
    assert torch.equal(unpack(packed, bits, count), codes)
    # the oracle: the row as one big integer, value i at bit i * bits
    for row, stream in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(value << (place * bits) for place, value in enumerate(row))
        assert number == sum((word & 0xFFFFFFFF) << (32 * place) for place, word in enumerate(stream))
