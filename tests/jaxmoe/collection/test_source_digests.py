# SPDX-License-Identifier: Apache-2.0
"""A resume sees that the user's own functions were edited, and which module it was."""

import dataclasses
import json

import pytest

from jaxmoe.checkpoint.same_run import ContentDigests, check_resume
from jaxmoe.collection.source_digests import named_modules, source_digests
from jaxmoe.config import ConfigError, to_json
from jaxmoe.config_file import load_config, override

CFG = load_config("tiny.py")
FILES = {
    "digested_rewards.py": "from own_package.parts import x\nimport json\n\ndef f(t): return 1.0\n",
    "own_loss.py": "import numpy as np\n\ndef g(logp_BT): return -logp_BT\n",
    "digested_map.py": "def h(row): return row\n",
    "own_package/__init__.py": "raise SystemExit('nobody may run this')\n",
    "own_package/parts.py": "from . import deeper\nfrom .deeper import x as y\n",
    "own_package/deeper.py": "x = 1\n",
    "nobodys.py": "x = 1\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def config(rewards="0.9 * digested_rewards:f(option='a:b+c') + 0.1 * digested_rewards:f"):
    data = dataclasses.replace(CFG.data, rewards=rewards, map_rows="digested_map:h")
    loss = dataclasses.replace(CFG.loss, objective="own_loss:g")
    return dataclasses.replace(CFG, data=data, loss=loss)


REACHED = {
    "digested_rewards.py": "digested_rewards",
    "own_loss.py": "own_loss",
    "digested_map.py": "digested_map",
    "own_package/__init__.py": "own_package",
    "own_package/parts.py": "own_package.parts",
    "own_package/deeper.py": "own_package.deeper",
}


def test_digests_are_of_named_modules_and_their_imports(folder):
    assert source_digests(config()).keys() == {f"source of {name}" for name in REACHED.values()}


def test_functions_of_this_package_have_no_digest():
    assert source_digests(CFG) == {}
    assert source_digests(override(CFG, "data.rewards=")) == {}


def test_an_installed_modules_imports_have_no_digest():
    assert source_digests(config("json:loads")).keys() >= {"source of json"}
    assert "source of json.decoder" not in source_digests(config("json:loads"))


def test_a_module_that_is_not_there_has_none(folder):
    digests = source_digests(config("there.is.no:such + built:in + sys:exit"))
    assert digests.keys() == {"source of own_loss", "source of digested_map"}


def test_modules_are_named_before_each_colon():
    texts = ("", "a:f(x='b:c+d') + 2 * c.d:g", "ours(x=1) + veto", "e:h")
    assert list(named_modules(texts)) == ["a", "c.d", "e"]
    adapted = "gym_adapter:Gym(env='my.env:Env', url='http://h:8000/x', limit=3)"
    assert list(named_modules([adapted])) == ["gym_adapter", "my.env"]


@pytest.mark.parametrize("edited", FILES)
def test_a_resume_after_an_edit_is_refused(folder, edited):
    saved, cfg = source_digests(config()), config()
    written = json.loads(to_json(cfg))
    assert check_resume(folder, written, cfg, ContentDigests(saved, source_digests(cfg))) == []
    with open(folder / edited, "a") as file:
        file.write("# another line\n")
    stored = ContentDigests(saved, source_digests(cfg))
    if edited not in REACHED:
        assert check_resume(folder, written, cfg, stored) == []
        return
    with pytest.raises(ConfigError) as error:
        check_resume(folder, written, cfg, stored)
    message = str(error.value)
    assert (
        f"whose source of {REACHED[edited]} had other contents" in message and "\n" not in message
    )
    assert message.endswith("Restore the file, or try a new --workdir.")
