"""`recipe`: the recipes that come with llmcompress, and whether one of your own is sound."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmcompress.api.recipes import packaged_recipes, recipe_file
from llmcompress.cli import console
from llmcompress.cli import options as flags
from llmcompress.errors import RecipeError
from llmcompress.recipe import load

if TYPE_CHECKING:
    from llmcompress.engine.plan.recipe_check import RecipeProblem

Name = Annotated[
    str,
    typer.Argument(help="A recipe of `llmcompress recipe list`, or a YAML file.", metavar="RECIPE", show_default=False),
]
OptionalModel = Annotated[
    Path | None, typer.Argument(help="Model directory to plan it on, from headers alone.", show_default=False)
]


def register(app: typer.Typer) -> None:
    recipe = typer.Typer(no_args_is_help=True, help="Recipes: those that come with llmcompress, and checking your own.")
    recipe.command("list")(list_)
    recipe.command("show")(show)
    recipe.command("check")(check)
    app.add_typer(recipe, name="recipe", rich_help_panel="Look")


def list_(json_: flags.Json = False) -> None:
    """The recipes that come with llmcompress, and when to use each."""
    rows = [(item.name, item.comment) for item in packaged_recipes().values()]
    if json_:
        console.print_json([{"recipe": name, "comment": comment} for name, comment in rows])
    else:
        console.table(None, ("recipe", "when to use it"), rows)


def show(recipe: Name, json_: flags.Json = False) -> None:
    """Print a recipe with its comment, to use as it is or to change."""
    file = recipe_file(recipe)
    if json_:
        console.print_json({"recipe": recipe, **load(file).as_data()})
        return
    load(file)  # what is not a recipe is not printed
    typer.echo(file.read_text(encoding="utf-8"), nl=False)


def check(recipe: Name, model: OptionalModel = None, json_: flags.Json = False) -> None:
    """Look for everything that is wrong with a recipe; exit code 2 if anything is.

    Without a model: keys, options and the order of steps. With one the recipe is planned on it as well, which reads
    headers and computes nothing.
    """
    from llmcompress.engine.plan.recipe_check import recipe_problems

    file = recipe_file(recipe)
    found = recipe_problems(file, model)
    if json_:
        console.print_json({"recipe": recipe, "ok": not found, "problems": [_facts(item) for item in found]})
    else:
        for item in found:
            typer.echo(f"{recipe}: {_line(item)}")
        if not found:
            typer.echo(f"{recipe}: sound" + (f", and can be carried out on {model}" if model is not None else ""))
    if found:
        raise RecipeError(f"{recipe} has {len(found)} problem{'s' * (len(found) > 1)}")


def _line(item: "RecipeProblem") -> str:
    step, said = f"step {item.step}", item.message
    if item.step is not None and not said.startswith(step):
        said = f"{step}: {said.removeprefix('step ')}"
    return f"{said} ({item.hint})" if item.hint else said


def _facts(item: "RecipeProblem") -> dict[str, Any]:
    return {"step": item.step, "message": item.message, "hint": item.hint}
