# SPDX-License-Identifier: Apache-2.0
"""Environments and tools as users of several projects write them, for tests of the adapters."""

import json
import types


class Counter:
    """TRL's form."""

    def __init__(self, start=0):
        self.start = start

    def reset(self, level: int, question: str, bonus: float = 0.5, **columns) -> str | None:
        self.total, self.bonus, self.columns = self.start, bonus, columns
        columns.clear()
        return f" (level {level})"

    def add(self, amount: int) -> int:
        """Add to the total.

        Args:
            amount: What to add.
        """
        self.total += amount
        return self.total

    async def double(self) -> int:
        """Double the total."""
        self.total *= 2
        return self.total

    def _hidden(self):
        return 0

    async def get_reward(self) -> float:
        return float(self.total == 6) + self.bonus


class Silent:
    """TRL's form, with a reset that requires nothing, and a close at the end."""

    closed = 0

    def reset(self, **columns):
        self.columns = columns

    def peek(self) -> dict:
        """Look at the columns."""
        return self.columns

    def close(self):
        type(self).closed += 1


class Undocumented:
    def reset(self):
        return None

    def act(self, word: str):
        return word


class SkyGuess:
    """SkyRL-gym's form."""

    def __init__(self, env_config=None, extras={}):  # noqa: B006
        self.truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras.get("max_turns", 3)
        self.turns, self.config = 0, env_config

    def init(self, prompt):
        return prompt + [{"role": "user", "content": "guess"}], {"hint": 1}

    def step(self, action):
        self.turns += 1
        is_over = action == self.truth or self.turns == self.max_turns
        observations = [] if is_over else [{"role": "user", "content": f"not {action}"}]
        reward = float(action == self.truth)
        return {"observations": observations, "reward": reward, "done": is_over, "metadata": {}}

    def get_metrics(self):
        return {"steps": self.turns, "name": "x"}

    def close(self):
        pass


class GymGuess:
    """Gymnasium's form, with texts."""

    def __init__(self, silent=False):
        self.silent = silent

    def reset(self, *, seed=None, options=None):
        self.answer = (options or {})["answer"]
        return "" if self.silent else f"Guess {seed}.", {"anything": object()}

    def step(self, action):
        is_right = action == self.answer
        return (
            "" if is_right else "Again.",
            float(is_right),
            is_right,
            False,
            {"anything": object(), "state_key": action},
        )

    def render(self):
        return None


class TunixGuess:
    """Tunix's form: the row is the first argument, the group and the pair follow by name."""

    def __init__(self, single_example, *, bonus=0.0, **kwargs):
        assert {"group_id", "pair_index"} <= kwargs.keys()
        self.task, self.bonus = single_example, bonus

    def reset(self):
        return {"question": self.task["question"] + " ?"}, {}

    def step(self, action):
        if isinstance(action, list):
            (call,) = action
            arguments = json.loads(call["function"]["arguments"])
            text = f"{call['function']['name']} {arguments}"
            return {"tool_outputs": {call["id"]: text}}, 0.0, False, {}
        return {}, float(action == self.task["answer"]) + self.bonus, True, {"response": action}

    @property
    def tool_manager(self):
        function = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
        schemas = [{"type": "function", "function": function}]
        return types.SimpleNamespace(get_json_schema=lambda: schemas)

    def final_reward_fn(self):
        return 0.125


class TunixText:
    def __init__(self, task=None, max_steps=1):
        self.task = task

    def reset(self):
        return "Say hi.", {}

    def step(self, action):
        return "again", 1.0, False, {}


class ToolOfVerl:
    """verl's BaseTool."""

    released = []

    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema or self.get_openai_tool_schema()
        self.name, self.calls = self.tool_schema.function.name, {}

    def get_openai_tool_schema(self):
        return self.tool_schema

    async def create(self, instance_id=None, **kwargs):
        instance_id = instance_id or f"id{len(self.calls)}"
        self.calls[instance_id] = [kwargs["create_kwargs"].get("secret")]
        return instance_id, types.SimpleNamespace(text=None)

    async def execute(self, instance_id, parameters, **kwargs):
        self.calls[instance_id].append(parameters["word"])
        text = f"{instance_id} {self.calls[instance_id]} {self.config}"
        return types.SimpleNamespace(text=text), -0.25, {"hits": 1, "name": "x"}

    async def calc_reward(self, instance_id, **kwargs):
        return float(len(self.calls[instance_id]))

    async def release(self, instance_id, **kwargs):
        self.released.append(instance_id)


WORD = {"word": {"type": "string", "description": "A word."}}


SCHEMA = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Note a word.",
        "parameters": {"type": "object", "properties": WORD, "required": ["word"]},
    },
}
