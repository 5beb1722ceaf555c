"""The argument specs are the one source of a role's variables: everything else must agree with them."""

import pathlib
import re

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir())


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(params=ROLES)
def role(request):
    return ROOT / "roles" / request.param


def test_defaults_are_those_of_the_spec(role):
    options = load(role / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    specified = {name: option["default"] for name, option in options.items() if "default" in option}
    assert load(role / "defaults/main.yml") == specified


def test_every_option_is_named_after_the_role_and_described(role):
    options = load(role / "meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    for name, option in options.items():
        assert name.startswith(role.name + "_"), name
        assert option.get("description") and option.get("type"), name


def test_every_entry_point_has_the_same_options(role):
    specs = load(role / "meta/argument_specs.yml")["argument_specs"]
    for name, spec in specs.items():
        assert spec["options"] == specs["main"]["options"], name
        assert (role / "tasks" / f"{name}.yml").is_file(), name


def test_task_files_are_short_and_every_task_is_named(role):
    for path in (role / "tasks").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") <= 150, path
        for task in load(path) or []:
            assert re.match(r"[A-Z]", task.get("name", "")), (path, task)
