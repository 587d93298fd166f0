"""The tests mirror the source: what tests a package lies in the folder of the same path."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SOURCE = ROOT / "src" / "llmcompress"
BY_KIND = {"attack", "fuzz", "interop"}  # sorted by what they do, since each test passes through many packages


def folders_of_tests() -> set[str]:
    return {str(file.parent.relative_to(TESTS)) for file in TESTS.rglob("test_*.py")} - {"."}


def test_every_folder_of_tests_has_its_folder_of_source():
    stray = {
        folder
        for folder in folders_of_tests() - BY_KIND
        if not (SOURCE / folder).is_dir() and not any((ROOT / folder).glob("*.py"))  # such as benchmarks/
    }
    assert stray == set()


def test_every_package_with_code_has_its_folder_of_tests():
    packages = {str(file.parent.relative_to(SOURCE)) for file in SOURCE.rglob("*.py") if file.stat().st_size}
    assert packages - folders_of_tests() == {"."}


def test_file_names_of_tests_are_unique():
    names = [file.name for file in TESTS.rglob("test_*.py")]
    assert len(names) == len(set(names)) > 100
