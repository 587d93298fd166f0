"""Score tasks with lm-evaluation-harness, and print what it found as JSON.

    .venv-lm_eval/bin/python lm_eval_check.py MODEL TASKS SAMPLES OPTIONS

TASKS is a folder of task files in YAML; an `include` of a path below `lm_eval/` means the task of that name that comes
with lm-evaluation-harness. The last line printed has, by task, its scores and the log-likelihoods of all choices, or
the texts that it wrote; its samples are saved in the folder SAMPLES, as its --log_samples does. OPTIONS are more
arguments of its `simple_evaluate`, as JSON.
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"


def main() -> None:
    model, tasks, samples, options = sys.argv[1:]
    os.environ["HF_HOME"] = f"{samples}/cache"

    import lm_eval
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    for file in Path(tasks).glob("*.yaml"):
        file.write_text(file.read_text().replace("include: lm_eval/", f"include: {Path(lm_eval.__file__).parent}/"))
    tracker = EvaluationTracker(output_path=samples)
    manager = TaskManager(include_path=tasks, include_defaults=False)
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": model, "dtype": "float32", "device": "cpu"},
        tasks=sorted(manager.all_tasks),
        task_manager=manager,
        batch_size=4,
        log_samples=True,
        bootstrap_iters=0,
        evaluation_tracker=tracker,
        **json.loads(options),
    )
    tracker.save_results_aggregated(results=found, samples=found["samples"])
    said = {}
    for name, rows in found["samples"].items():
        once = [row for row in rows if row["filter"] == rows[0]["filter"]]  # each filter has rows of its own
        answers = [[pair[0] for pair in row["resps"]] for row in once]
        texts = [one for of_row in answers for one in of_row if isinstance(one, str)]
        likely = [] if texts else [[pair[0] for pair in of_row] for of_row in answers]
        tracker.save_results_samples(task_name=name, samples=rows)
        said[name] = {"scores": found["results"][name], "loglikelihood": likely, "texts": texts}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
