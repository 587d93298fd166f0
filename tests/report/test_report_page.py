"""The page: the same bytes for the same inputs, true to its inputs, and closed to what strangers' names might do."""

import html
import json
import re
from hashlib import sha256
from html.parser import HTMLParser
from xml.etree import ElementTree

import gguf
import pytest
from safetensors import safe_open

from llmcompress.engine.execute import run
from llmcompress.engine.plan.make_plan import make_plan
from llmcompress.engine.plan.run_options import Options
from llmcompress.engine.write.report_schema import LayerDone, Linear, Start
from llmcompress.recipe import parse
from llmcompress.report.cells import METRICS, cells_of
from llmcompress.report.figures import binned
from llmcompress.report.page import render
from llmcompress.report.page_inputs import Timed, read_outputs
from llmcompress.report.parts import parts_of
from llmcompress.report.words import duration, figure, marked_words, size
from llmcompress.validate.session import Request, evaluate_whole

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(1)">&\'%{z}'


class Elements(HTMLParser):
    """Elements of a page with their attributes, and the texts of scripts."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data

    def all(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def page(made, *names):
    return render(read_outputs([made.outputs[n] for n in names], [made.evaluations[n] for n in names], [made.timings]))


@pytest.fixture(scope="module")
def whole(made):
    return page(made, "four", "three", "small.gguf")


class Drawn:
    """A plot as an XML reader sees it: titles of its shapes with their elements, and the places that axes name."""

    def __init__(self, text):
        self.root = ElementTree.fromstring(text)
        shapes = [shape for shape in self.root.findall("path") if shape.find("title") is not None]
        self.shapes = {shape.find("title").text: shape for shape in shapes}
        assert len(self.shapes) == len(shapes)

    def axis(self, name):
        """A function from a place on an axis to its value, by two of the places that the axis names; and all values."""
        words = [word for word in self.root.findall("text") if word.get("class") == name]
        # a word's middle lies 4 above its baseline
        named = [(place(word)[1] - 4 if name == "y" else place(word)[0], float(word.text)) for word in words]
        (first, low), (last, high) = named[0], named[-1]
        middle = dict(named).keys() - {first, last}
        straight = all(
            low + (at - first) / (last - first) * (high - low) == pytest.approx(dict(named)[at], rel=0.02, abs=1e-9)
            for at in middle
        )
        if straight:
            return lambda at: low + (at - first) / (last - first) * (high - low)
        return lambda at: low * (high / low) ** ((at - first) / (last - first))


def place(element):
    """Where an element stands."""
    if moved := element.get("transform"):
        return tuple(map(float, re.match(r"translate\((\S+) (\S+)\)", moved).groups()))
    return float(element.get("x")), float(element.get("y"))


def figures(text):
    """Plots by the id of their place."""
    found = re.findall(r'<div class="plot" id="([^"]+)">\s*(<svg.*?</svg>)', text, re.S)
    return {name: Drawn(svg) for name, svg in found}


def test_the_same_inputs_give_the_same_bytes(made, whole, main, tmp_path):
    arguments = made.arguments("four", "three", "small.gguf")
    assert main("report", *arguments, "-o", tmp_path / "page.html") == 0
    assert (tmp_path / "page.html").read_text() == whole


def test_the_page_asks_nothing_of_anyone(whole):
    elements = Elements(whole)
    asking = [
        value
        for _, attributes in elements.found
        for key, value in attributes.items()
        if key in ("src", "href", "data", "action", "srcset") and not value.startswith(("#", "data:"))
    ]
    assert asking == []
    assert not re.search(r"url\(|@import", "".join(re.findall(r"<style>(.*?)</style>", whole, re.S)))


def test_nothing_may_run_and_the_page_is_small(whole):
    elements = Elements(whole)
    (policy,) = (meta["content"] for meta in elements.all("meta") if "http-equiv" in meta)
    assert policy.startswith("default-src 'none'; ")
    assert "script" not in policy
    assert elements.all("script") == []
    assert not any(key.startswith("on") for _, attributes in elements.found for key in attributes)
    assert len(whole) < 250_000


def test_every_figure_has_its_place(whole):
    places = {attributes["id"] for attributes in Elements(whole).all("div") if "id" in attributes}
    assert places == set(figures(whole))
    assert {"size-kl", "sizes", "kl-windows", "kl-positions", "seconds", "memory", "rtn_ratio-0", "bits-2"} <= places


def test_heat_maps_hold_what_the_report_says_and_darker_is_more(made, whole):
    report = json.loads((made.outputs["four"] / "report.json").read_text())
    values = {linear["name"]: linear["relative_error"] for linear in report["linears"]}
    drawn = figures(whole)["relative_error-0"]
    said = {}
    for title, cell in drawn.shapes.items():
        layer, name, shown = re.fullmatch(r"layer (\d+), (\S+): (\S+)", title).groups()
        value = values.pop(f"model.layers.{layer}.{name}")
        assert shown == figure(value)
        said[value] = sum(int(cell.get("fill")[at : at + 2], 16) for at in (1, 3, 5))
    assert values == {}
    brightness = [said[value] for value in sorted(said)]
    assert brightness == sorted(brightness, reverse=True)
    assert len(set(brightness)) > 5


def test_points_and_lines_lie_where_their_axes_say(made, whole):
    evaluation = json.loads(made.evaluations["three"].read_text())
    report = json.loads((made.outputs["three"] / "report.json").read_text())
    drawn = figures(whole)["size-kl"]
    (point,) = (shape for title, shape in drawn.shapes.items() if title.startswith("three"))
    x, y = place(point)
    assert drawn.axis("x")(x) == pytest.approx(report["output_bytes"] / 1e6, rel=0.01)
    assert drawn.axis("y")(y) == pytest.approx(evaluation["figures"]["kl"], rel=0.01)
    (bar,) = (path for path in drawn.root.findall("path") if path.get("class") == "line" and f"M{x}" in path.get("d"))
    top, bottom = map(float, re.match(r"M\S+ (\S+?)V([\d.]+)", bar.get("d")).groups())
    low, high = evaluation["figures"]["kl_ci"]
    assert [drawn.axis("y")(end) for end in (bottom, top)] == pytest.approx([low, high], rel=0.01)
    drawn = figures(whole)["kl-windows"]
    for number, kl in enumerate(evaluation["by_window"]["kl"], 1):
        x, y = place(drawn.shapes[f"three, {number}: {figure(kl)}"])
        assert drawn.axis("x")(x) == pytest.approx(number, rel=0.01)
        assert drawn.axis("y")(y) == pytest.approx(kl, rel=0.01)
    assert figure(evaluation["figures"]["kl"]) in whole
    assert size(report["output_bytes"]) in whole


def test_colours_mean_the_same_in_all_outputs(whole):
    """Equal values have equal colours, whichever output they are of."""
    drawn = figures(whole)
    for metric in METRICS:
        colours = {}
        for name, plot in drawn.items():
            if re.fullmatch(rf"{metric.key}-\d+", name):
                for title, cell in plot.shapes.items():
                    colours.setdefault(title.rpartition(": ")[2].split()[0], []).append(cell.get("fill"))
        for shown, found in colours.items():
            channels = [[int(colour[at : at + 2], 16) for colour in found] for at in (1, 3, 5)]
            assert all(max(each) - min(each) < 12 for each in channels), (metric.key, shown)


def test_a_metric_that_is_the_same_everywhere_is_said_in_words(made):
    text = page(made, "four")
    assert "bits-0" not in figures(text)
    assert "4.25 throughout." in text


def test_the_page_begins_with_what_came_of_it(made, whole):
    found = json.loads(made.evaluations["four"].read_text())["figures"]
    report = json.loads((made.outputs["four"] / "report.json").read_text())
    share = f"{report['output_bytes'] / report['source']['bytes']:.0%} of the original&#39;s size"
    (first, *_) = re.findall(r'<p class="verdict">(.*?)</p>', whole)
    assert first.startswith(f"four has {share}")
    assert f"the same most likely next token {found['top1']:.0%} of the time" in first
    alone = render(read_outputs([made.outputs["four"]], [], []))
    assert f"It has {share}" in alone
    assert "how faithful it is was not measured" in alone


def test_parts_are_those_of_the_files(made, whole):
    """The bytes of every tensor, by the safetensors library and the gguf package."""
    with safe_open(made.outputs["four"] / "model.safetensors", "pt") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    norms = sum(count for name, count in sizes.items() if "norm" in name)
    attention = sum(count for name, count in sizes.items() if "self_attn" in name)
    tensors = gguf.GGUFReader(made.outputs["small.gguf"]).tensors
    down = sum(int(tensor.n_bytes) for tensor in tensors if "ffn_" in tensor.name and "norm" not in tensor.name)
    titles = figures(whole)["sizes"].shapes
    assert f"four, norms: {size(norms)}, {norms / sum(sizes.values()):.0%}" in titles
    assert f"four, attention: {size(attention)}, {attention / sum(sizes.values()):.0%}" in titles
    assert any(title.startswith(f"small.gguf, feed-forward: {size(down)}, ") for title in titles)
    found = parts_of(made.outputs["four"])
    assert sum(found.values()) == sum(sizes.values())
    assert "other" not in found


def answered(place, output, name, right, of, original=None, **asked):
    """An evaluation on one task beside an output, with figures that are made up."""
    figures = {"items": of, "acc": right / of, "acc_ci": [0.25, 0.75], "loglikelihood": -2.0}
    figures["loglikelihood_ci"] = [-3.0, -1.0]
    if original is not None:
        figures |= {"ref_acc": original / of, "acc_drop": (original - right) / of, "acc_drop_ci": [-0.125, 0.375]}
    document = {
        "schema_version": 1,
        "llmcompress": "0",
        "model": {"name": "x", "report_sha256": sha256((output / "report.json").read_bytes()).hexdigest()},
        "reference": None,
        "asked": {"name": name, "items_sha256": "0" * 64, "shots": 0, "chat": False, **asked},
        "compute_dtype": "float32",
        "figures": figures,
        "tasks": {HOSTILE: figures, "other": figures},
    }
    file = place / f"{output.name}{len(list(place.iterdir()))}.json"
    file.write_text(json.dumps(document))
    return file


def test_right_answers_stand_beside_each_other(made, tmp_path):
    four, three = made.outputs["four"], made.outputs["three"]
    files = [
        answered(tmp_path, four, "default", 1, 8, 5),
        answered(tmp_path, four, "default", 4, 8, 5),  # the last counts
        answered(tmp_path, three, "default", 2, 8, 5),
        answered(tmp_path, three, "mine", 6, 8, shots=3, chat=True),
    ]
    text = render(read_outputs([four, three], files, []))
    shown = [html.unescape(re.sub("<[^>]+>", "|", row)) for row in re.findall(r"<tr [^>]*>.*?</tr>", text)]
    titles = [number for number, row in enumerate(shown) if "Right answers" in row]
    assert [shown[number].strip("|") for number in titles] == [
        "Right answers to the shipped tasks, 95% intervals",
        "Right answers to mine, 3 examples before each item, in a chat, 95% intervals",
    ]
    rows = [[part for part in row.split("|") if part] for row in shown[titles[0] + 1 : titles[1]]]
    below = ["25.0% – 75.0%, 8 items", "original 62.5%"]
    values = ["50.0%", *below, "lost 12.5% (-12.5% – 37.5%)", "25.0%", *below, "lost 37.5% (-12.5% – 37.5%)"]
    assert rows == [[name, *values] for name in (HOSTILE, "other", "All tasks")]
    assert "–" in shown[titles[1] + 1]  # not measured
    assert "75.0%" in shown[titles[1] + 1]
    assert "four has" in text
    assert "answers 50.0% of 8 items right, the original 62.5%." in text
    assert Elements(text).scripts == []


def test_what_was_measured_with_something_left_out_stands_apart(made, tmp_path):
    four, three = made.outputs["four"], made.outputs["three"]
    document = json.loads(made.evaluations["four"].read_text())
    document["figures"] |= {"omitted": "--kv h2o:0.5 in 4 of 4 layers", "top1": 0.125}
    evicted = tmp_path / "evicted.json"
    evicted.write_text(json.dumps(document))
    files = [made.evaluations["four"], evicted]
    text = html.unescape(render(read_outputs([four, three], files, [])))
    assert len(re.findall("On [^<]* tokens, 95% intervals", text)) == 1
    assert len(re.findall("On [^<]* tokens, --kv h2o:0.5 in 4 of 4 layers, 95% intervals", text)) == 1
    assert "four, --kv h2o:0.5 in 4 of 4 layers: " in text  # the point of size against KL
    (first, *_) = re.findall(r'<p class="verdict">(.*?)</p>', text)
    assert "12%" not in first
    answers = tmp_path / "answers"
    answers.mkdir()
    files = [
        answered(answers, four, "default", 4, 8, 5),
        answered(answers, four, "default", 1, 8, 5, omitted="--kv h2o:0.5 in 4 of 4 layers"),
    ]
    text = html.unescape(render(read_outputs([four, three], files, [])))
    assert "Right answers to the shipped tasks, --kv h2o:0.5 in 4 of 4 layers, 95% intervals" in text
    assert "Right answers to the shipped tasks, 95% intervals" in text
    assert "answers 50.0% of 8 items right" in text


def test_matrices_with_the_largest_errors_are_named(made):
    (table,) = re.findall(
        r'aria-label="Matrices of four with the largest errors">(.*?)</table>', page(made, "four"), re.S
    )
    named = re.findall(r'<th scope="row">([^<]*)</th>', table)
    linears = json.loads((made.outputs["four"] / "report.json").read_text())["linears"]
    assert named == [each["name"] for each in sorted(linears, key=lambda each: each["loss"], reverse=True)[:8]]


def test_what_an_output_writes_stands_beside_the_original(made, whole):
    (section,) = re.findall(r'<section id="written">(.*?)</section>', whole, re.S)
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", section, re.S)
    assert [name for name, _ in found] == ["original", "four", "three", "small.gguf"]
    plain = {name: html.unescape(re.sub(r"</?mark>", "", text)) for name, text in found}
    for name, file in made.evaluations.items():
        written = json.loads(file.read_text())["written"]
        assert (plain[name], plain["original"]) == (written["model"], written["reference"])


def test_words_that_are_not_the_originals_are_marked():
    assert marked_words("a new dog  barks", "a dog barks") == [
        ("a", False),
        (" new", True),
        (" dog", False),
        ("  barks", True),
    ]
    assert marked_words("the same", "the same") == [("the same", False)]
    assert marked_words("anything", None) == [("anything", False)]
    assert marked_words("", "something") == []
    assert marked_words("x", "") == [("x", True)]


def test_names_of_strangers_stay_text(made, tmp_path):
    out = tmp_path / "<b>&quot;out"
    out.mkdir()
    report = json.loads((made.outputs["four"] / "report.json").read_text())
    for linear in report["linears"]:
        linear["name"] = linear["name"].replace("q_proj", HOSTILE)
    report["ledger"] = [{"kind": "engine", "subject": HOSTILE, "why": HOSTILE}]
    report["recipe"]["steps"][0]["method"] = HOSTILE
    (out / "report.json").write_text(json.dumps(report))
    text = render(read_outputs([out], [], []))
    elements = Elements(text)
    assert elements.all("script") == []
    assert elements.all("img") == []
    assert elements.all("b") == []
    assert text.count("alert(1)") >= 3
    assert html.escape(HOSTILE, quote=False).replace('"', "&#34;").replace("'", "&#39;") in text
    assert any(HOSTILE in title for title in figures(text)["relative_error-0"].shapes)


def linear(name, **about):
    shape = {"shape": [8, 64], "permuted": False, "transposed": False, "relative_error": 0.1}
    return Linear.model_validate_json(
        json.dumps({"name": name, "method": "gptq", "grid": "int4-g32-sym", **shape, **about})
    )


def test_an_output_without_matrices_and_evaluations_without_a_reference_have_a_page(tiny_model_dir, tmp_path):
    paths, files = [], []
    for number, ref in enumerate((None, tiny_model_dir)):
        out = tmp_path / f"rotated{number}"
        steps = [{"method": "rotate", "seed": number}]
        run(make_plan(parse({"steps": steps, "output": {"format": "dense"}}), tiny_model_dir, Options(out=out)))
        request = Request(out, ref, "default", 16, 1, 1, "cpu", "float32")
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(evaluate_whole(request, lambda done, of: None)))
        paths.append(out)
        files.append(file)
    assert set(figures(render(read_outputs(paths[:1], files[:1], [])))) == {"sizes"}
    assert set(figures(render(read_outputs(paths, files, [])))) == {"sizes", "kl-windows", "kl-positions"}


def test_experts_of_a_layer_share_a_cell():
    names = ["model.layers.0.self_attn.q_proj", *(f"model.layers.1.mlp.experts.{n}.up_proj" for n in (0, 1, 10))]
    errors = (0.5, 0.1, 0.2, 0.6)
    cells = cells_of([linear(name, relative_error=e) for name, e in zip(names, errors, strict=True)])
    assert cells.layers == [0, 1]
    assert cells.linears == ["self_attn.q_proj", "mlp.experts.*.up_proj"]
    error = next(metric for metric in METRICS if metric.key == "relative_error")
    assert cells.rows(error) == [[0.5, None], [None, pytest.approx(0.3)]]
    bits = next(metric for metric in METRICS if metric.key == "bits")
    assert cells.value(bits, 0, "self_attn.q_proj") == 4 + 16 / 32


def test_names_of_other_models_have_layers_too():
    cells = cells_of([linear("transformer.h.3.attn.c_attn"), linear("blk.4.attn_q"), linear("head")])
    assert set(cells.matrices) == {(3, "attn.c_attn"), (4, "attn_q"), (0, "head")}


def test_bins_keep_the_mean():
    values = [float(n % 7) for n in range(511)]
    middles, resources = binned(values)
    assert len(resources) <= 48
    assert middles[0] == pytest.approx(6)  # of the positions 1 to 11
    widths = [11] * 46 + [511 - 46 * 11]
    assert sum(w * m for w, m in zip(widths, resources, strict=True)) / 511 == pytest.approx(
        sum(values) / 511, rel=1e-5
    )
    assert binned([3.0, 4.0]) == ([1.0, 2.0], [3.0, 4.0])


def test_times_of_a_run_that_went_on_are_added_and_one_begun_anew_forgets():
    def start(done):
        return Start(
            event="start", schema_version=1, llmcompress="0", run="0" * 64, layers=2, done=done, threads=1, device="cpu"
        )

    def layer(number, seconds):
        peak = int(seconds)
        return LayerDone(
            event="layer", run="0" * 64, layer=number, seconds=seconds, solving=0.0, peak_memory_bytes=peak
        )

    timed = Timed()
    for line in (start(0), layer(0, 9.0), start(0), layer(0, 2.0), start(1), layer(1, 3.0)):
        timed.add(line)
    assert timed.seconds == 5
    assert timed.peak == 3


def test_runs_side_by_side_may_share_a_file_of_timings(made, tmp_path):
    lines = made.timings.read_text().splitlines()
    runs = {json.loads(line)["run"]: [] for line in lines}
    for line in lines:
        runs[json.loads(line)["run"]].append(line)
    mixed = tmp_path / "mixed"
    mixed.write_text("\n".join(line for together in zip(*runs.values(), strict=True) for line in together))
    paths = list(made.outputs.values())
    assert [output.timed for output in read_outputs(paths, [], [mixed])] == [
        output.timed for output in read_outputs(paths, [], [made.timings])
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0141, "0.0141"), (0.014, "0.0140"), (106.57, "107"), (12345.6, "12,346"), (5e-6, "5.00e-06")],
)
def test_numbers_have_three_digits(value, text):
    assert figure(value) == text


def test_sizes_and_times_read_well():
    assert [size(n) for n in (12, 1500, 101_800_000, 7.5e9)] == ["12 B", "1.5 kB", "102 MB", "7.5 GB"]
    assert [duration(s) for s in (1.21, 75, 7260)] == ["1.2 s", "1 min 15 s", "2 h 1 min"]
