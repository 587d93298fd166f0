"""What can be trained: scales that are free numbers of the type they are stored in."""

import torch

from llmcompress.engine.train.trained import TrainedMatrix
from llmcompress.grids.coded import Coded
from llmcompress.grids.fitting import fit
from llmcompress.grids.integer import IntegerSpec


def test_scales_that_another_type_would_round_are_not_trained():
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    grid = fit(weight, IntegerSpec(4, 32, True), scale_dtype=torch.float16)
    coded = Coded(grid.encode(weight), grid)
    assert TrainedMatrix.of("q_proj", lambda: coded, torch.bfloat16, False) is None
    same = TrainedMatrix.of("q_proj", lambda: coded, torch.float16, False)
    assert same is not None
    assert torch.equal(same.value(), coded.decode())
