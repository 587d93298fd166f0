"""The workflows of docs/ci.md, job by job as their services run them: fresh directories, and the cache alone."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
GITHUB, GITLAB = (
    yaml.safe_load(text)
    for text in re.findall(
        r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "ci.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )
)
RECIPE = {"steps": [{"method": "gptq", "bits": 4, "group_size": 32}], "calibration": {"samples": 4, "length": 64}}
pytestmark = pytest.mark.slow


class Service:
    """Runs scripts in the fresh directory of a job. What `gh` and `pip` are asked is written to a file."""

    def __init__(self, place, model):
        self.place, self.model, self.jobs = place, model, 0
        self.cache = place / "cache"
        self.asked = place / "asked"
        self.programs = place / "bin"
        self.programs.mkdir()
        for name in ("gh", "pip"):
            (self.programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {self.asked}\n')
        (self.programs / "python").write_text(f'#!/bin/sh\necho python "$@" >> {self.asked}\n')
        (self.programs / "llmcompress").write_text(f'#!/bin/sh\nexec {sys.executable} -m llmcompress "$@"\n')
        for program in self.programs.iterdir():
            program.chmod(0o755)

    def checkout(self):
        """The directory of a new job, as the repository holds it."""
        self.jobs += 1
        here = self.place / f"job-{self.jobs}"
        here.mkdir()
        shutil.copytree(self.model, here / "model")
        (here / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
        return here

    def bash(self, script, here, **environment):
        """The exit code of a script, whose deadline has passed once it begins."""
        known = {**os.environ, "PATH": f"{self.programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
        script = script.replace("--deadline 6000", "--deadline 0")
        return subprocess.run(
            ["bash", "-e", "-c", script], cwd=here, env={**known, **environment}, check=False
        ).returncode

    def keep(self, folder):
        shutil.rmtree(self.cache, ignore_errors=True)
        shutil.copytree(folder, self.cache)

    def restore(self, folder):
        if self.cache.exists():
            shutil.copytree(self.cache, folder)


def github_job(service):
    """Carry out the steps of one job; the paths that it uploads, where they exist."""
    here, code, uploaded = service.checkout(), "", []
    for step in GITHUB["jobs"]["compress"]["steps"]:
        wanted = re.fullmatch(r"steps.compress.outputs.code == '(\d+)'", step.get("if", ""))
        if wanted and wanted[1] != code:
            continue
        name = step.get("uses", "").split("@")[0]
        if name == "actions/cache/restore":
            service.restore(here / step["with"]["path"])
        elif name == "actions/cache/save":
            service.keep(here / step["with"]["path"])
        elif name == "actions/upload-artifact":
            uploaded = [here / path for path in step["with"]["path"].split()]
        if "run" in step:
            output = here / "github-output"
            environment = {**GITHUB["env"], "GITHUB_OUTPUT": str(output), "GITHUB_REF_NAME": "main"}
            assert service.bash(step["run"], here, **environment) == 0
            code = output.read_text().strip().removeprefix("code=") if output.exists() else code
    return code, [path for path in uploaded if path.exists()]


def test_github_goes_on_in_a_job_of_its_own_and_uploads_what_was_made(shallow_model_dir, tmp_path):
    service = Service(tmp_path, shallow_model_dir)
    codes = []
    while not codes or codes[-1] == "75":
        code, uploaded = github_job(service)
        codes.append(code)
        assert len(codes) < 9
    assert codes == ["75", "0"]  # a layer each
    assert service.asked.read_text().count("gh workflow run compress.yml --ref main") == 1
    assert [path.name for path in uploaded] == ["out", "reports"]
    assert (uploaded[0] / "model.safetensors").is_file()
    assert sorted(file.name for file in uploaded[1].iterdir()) == ["eval.json", "eval.xml", "run.xml", "verify.xml"]


def test_gitlab_tries_again_and_uploads_what_was_made(shallow_model_dir, tmp_path):
    job, service, codes = GITLAB["compress"], Service(tmp_path, shallow_model_dir), []
    while not codes or codes[-1] == job["retry"]["exit_codes"]:
        here = service.checkout()
        service.restore(here / job["cache"]["paths"][0])
        codes.append(service.bash("\n".join(job["script"]), here, **job["variables"]))
        if codes[-1]:
            service.keep(here / job["cache"]["paths"][0])
        assert len(codes) < 9
    assert codes == [75, 0]
    assert all((here / path).is_dir() for path in job["artifacts"]["paths"])
    assert len(list(here.glob(job["artifacts"]["reports"]["junit"]))) == 3
