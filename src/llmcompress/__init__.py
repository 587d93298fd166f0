"""llmcompress: make large language models small, offline, from one command line or from Python.

Every name below is imported when it is first used, so `import llmcompress` takes no time and does not import torch.

    >>> import llmcompress
    >>> result = llmcompress.compress("model", method="gptq", bits=4, samples=8, length=128, output="model-w4")
    >>> llmcompress.verify(result.output, source="model").ok
    True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from llmcompress.api.answers import TasksResult, evaluate_tasks
    from llmcompress.api.compression import compress, export, plan, run
    from llmcompress.api.evaluation import EvaluationResult, evaluate
    from llmcompress.api.fitting import FitResult, fit
    from llmcompress.api.long_text import LongResult, evaluate_long
    from llmcompress.api.recipes import load_recipe
    from llmcompress.api.results import Result
    from llmcompress.api.structure import prune_depth, prune_width, recover, repair_lora, train_draft
    from llmcompress.api.verification import VerificationResult, verify
    from llmcompress.engine.plan.plan import Plan
    from llmcompress.engine.plan.run_options import Options
    from llmcompress.engine.process.progress import Progress
    from llmcompress.errors import (
        CalibrationError,
        CheckpointError,
        GateError,
        LlmcompressError,
        PlanError,
        RecipeError,
        RunError,
        StoppedError,
    )
    from llmcompress.recipe import Calibration, Recipe

_MODULES = {
    "llmcompress.api.answers": ("TasksResult", "evaluate_tasks"),
    "llmcompress.api.compression": ("compress", "export", "plan", "run"),
    "llmcompress.api.evaluation": ("EvaluationResult", "evaluate"),
    "llmcompress.api.fitting": ("FitResult", "fit"),
    "llmcompress.api.long_text": ("LongResult", "evaluate_long"),
    "llmcompress.api.recipes": ("load_recipe",),
    "llmcompress.api.results": ("Result",),
    "llmcompress.api.structure": ("prune_depth", "prune_width", "recover", "repair_lora", "train_draft"),
    "llmcompress.api.verification": ("VerificationResult", "verify"),
    "llmcompress.engine.plan.run_options": ("Options",),
    "llmcompress.engine.plan.plan": ("Plan",),
    "llmcompress.engine.process.progress": ("Progress",),
    "llmcompress.errors": (
        "CalibrationError",
        "CheckpointError",
        "GateError",
        "LlmcompressError",
        "PlanError",
        "RecipeError",
        "RunError",
        "StoppedError",
    ),
    "llmcompress.recipe": ("Calibration", "Recipe"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Calibration",
    "CalibrationError",
    "CheckpointError",
    "EvaluationResult",
    "FitResult",
    "GateError",
    "LlmcompressError",
    "LongResult",
    "Options",
    "Plan",
    "PlanError",
    "Progress",
    "Recipe",
    "RecipeError",
    "Result",
    "RunError",
    "StoppedError",
    "TasksResult",
    "VerificationResult",
    "__version__",
    "compress",
    "evaluate",
    "evaluate_long",
    "evaluate_tasks",
    "export",
    "fit",
    "load_recipe",
    "plan",
    "prune_depth",
    "prune_width",
    "recover",
    "repair_lora",
    "run",
    "train_draft",
    "verify",
]


def __getattr__(name: str) -> Any:
    """A public name, imported from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
