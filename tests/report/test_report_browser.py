"""The page in a real browser: it draws every plot, logs nothing, and asks no network for anything."""

import html
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from llmcompress.report.page import render
from llmcompress.report.page_inputs import read_outputs

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (Debian: apt-get install chromium)"),
]
QUIET = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-extensions",
    "--disable-features=Translate,OptimizationHints,MediaRouter", "--no-default-browser-check",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]  # fmt: skip


class Seen(NamedTuple):
    """What a browser made of a page: its elements at the end, lines of the console, hosts it asked for."""

    elements: str
    console: list[str]
    asked: set[str]


def look(page: Path, folder: Path, *options: str) -> Seen:
    log = folder / "net.json"
    done = subprocess.run(
        [
            CHROMIUM, *QUIET, f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000",
            "--enable-logging=stderr", "--v=0", f"--log-net-log={log}", *options, "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return Seen(done.stdout, re.findall(r"\bCONSOLE\b.*", done.stderr), _asked(log))


def _asked(log: Path) -> set[str]:
    """Hosts that any request was meant for; none is reached."""
    events = json.loads(log.read_text())["events"]
    urls = (urlsplit(event["params"]["url"]) for event in events if "url" in event.get("params", {}))
    return {url.netloc for url in urls if url.scheme not in ("file", "data", "blob", "about", "chrome")}


@pytest.fixture(scope="module")
def idle(tmp_path_factory):
    """What the browser asks for by itself."""
    folder = tmp_path_factory.mktemp("idle")
    page = folder / "empty.html"
    page.write_text('<!doctype html><link rel="icon" href="data:,"><title>nothing</title>')
    return look(page, folder)


@pytest.mark.parametrize("names", [("four",), ("four", "three", "small.gguf")], ids=["one", "several"])
def test_the_page_draws_all_its_plots_in_silence(made, idle, tmp_path, names):
    outputs = [made.outputs[name] for name in names]
    text = render(read_outputs(outputs, [made.evaluations[name] for name in names], [made.timings]))
    page = tmp_path / "page.html"
    page.write_text(text)
    seen = look(page, tmp_path)
    assert seen.console == []
    assert seen.asked <= idle.asked
    places = re.findall(r'<div class="plot" id="([^"]+)"', text)
    drawn = dict(re.findall(r'<div class="plot" id="([^"]+)"(.*?)</figure>', seen.elements, re.S))
    assert set(drawn) == set(places)
    assert len(places) > 5
    assert all("<title>" in content for content in drawn.values())


@pytest.mark.parametrize("width", [400, 768, 1200])
def test_nothing_is_wider_than_the_screen(made, tmp_path, width):
    """A frame of that width, whose script, allowed here, measures what the page would scroll sideways."""
    names = ["four", "three", "small.gguf"]
    text = render(read_outputs([made.outputs[n] for n in names], [made.evaluations[n] for n in names], [made.timings]))
    open_page = re.sub(r"<meta http-equiv.*?>", "", text)
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<!doctype html><link rel="icon" href="data:,"><iframe style="width:{width}px;height:900px;border:0" '
        f'srcdoc="{html.escape(open_page)}"></iframe><script>onload = () => {{ const page = '
        "document.querySelector('iframe').contentDocument; const wide = (what) => what.scrollWidth - what.clientWidth;"
        "document.title = [wide(page.documentElement), wide(page.querySelector('.summary').parentElement),"
        "parseFloat(getComputedStyle(page.querySelector('.plot text')).fontSize) "
        "* page.querySelector('.plot svg').getBoundingClientRect().width / 420].join(' ') }</script>"
    )
    found = re.search(r"<title>(\S+) (\S+) (\S+)</title>", look(outer, tmp_path).elements).groups()
    assert [float(each) for each in found[:2]] == [0, 0]
    assert float(found[2]) > 9.5  # pixels of the words on plots


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_axe_finds_nothing_that_keeps_readers_out(made, tmp_path, theme):
    """axe-core on a copy of the page that lets its script run."""
    names = ["four", "three", "small.gguf"]
    text = render(read_outputs([made.outputs[n] for n in names], [made.evaluations[n] for n in names], [made.timings]))
    axe = files("axe_core_python").joinpath("axe.min.js").read_text()
    found = _violations(text, axe, tmp_path, theme)
    assert found == []
    pale = _violations(text.replace("--soft: ", "--soft: #8888; --was: "), axe, tmp_path, theme)
    assert "color-contrast" in {rule for rule, _, _ in pale}


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("kind", ["depth", "width", "lora", "draft"])
def test_axe_finds_nothing_on_pages_of_other_structures(structural, main, tmp_path, kind, theme):
    page = tmp_path / "page.html"
    assert main("report", structural[kind], "-o", page) == 0
    axe = files("axe_core_python").joinpath("axe.min.js").read_text()
    text = page.read_text()
    assert _violations(text, axe, tmp_path, theme) == []
    mute = text.replace('<html lang="en"', "<html")
    assert {rule for rule, _, _ in _violations(mute, axe, tmp_path, theme)} == {"html-has-lang"}


def _violations(text, axe, folder, theme):
    """Rules of axe-core that a page breaks, each with the element that does and what is said of it."""
    end = (
        "axe.run().then(({ violations }) => { document.title = 'found ' + JSON.stringify(violations.flatMap((rule) => "
        "rule.nodes.map((node) => [rule.id, node.target.join(' '), node.any.map((one) => one.message).join('; ')]))) })"
    )
    page = folder / "open.html"
    page.write_text(f"{re.sub(r'<meta http-equiv.*?>', '', text)}<script>{axe}</script><script>{end}</script>")
    scheme = {"dark": 0, "light": 1}[theme]
    seen = look(page, folder, f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1200,900")
    return json.loads(html.unescape(re.search(r"<title>found (.*?)</title>", seen.elements)[1]))


def test_the_test_would_see_an_error_and_a_request(idle, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<!doctype html><link rel="icon" href="data:,"><script>undefined_function()</script>'
        '<img src="http://example.invalid/x.png">'
    )
    seen = look(page, tmp_path)
    assert any("undefined_function" in line for line in seen.console)
    assert seen.asked - idle.asked == {"example.invalid"}


def test_the_policy_stops_what_a_name_might_smuggle_in(made, tmp_path):
    """Even if escaping failed, no script would run and nothing would be asked for."""
    smuggled = '<script>document.title = "run"</script><img src="http://example.invalid/x.png">'
    page = tmp_path / "page.html"
    page.write_text(render(read_outputs([made.outputs["four"]], [], [])).replace("</main>", f"{smuggled}</main>"))
    seen = look(page, tmp_path)
    assert "<title>run</title>" not in seen.elements
    assert "example.invalid" not in seen.asked
    assert any("Content Security Policy" in line for line in seen.console)
