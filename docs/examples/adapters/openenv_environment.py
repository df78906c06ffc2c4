# SPDX-License-Identifier: Apache-2.0
"""An OpenEnv 0.10 server by its URL.

    data.environment=openenv_environment:OpenEnvEnvironment(url='http://127.0.0.1:8000')

The client is that of the package openenv, which the user installs. An action is {field: text of
the turn}; the first observation's text is appended to the row's question, later ones are user
messages.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from jaxmoe.config import ConfigError
from jaxmoe.data.rows import Message, Row, prompt_messages
from jaxmoe.environments.environment import (
    Unchecked,
    append_to_question,
    row_columns,
    turn_text,
)
from jaxmoe.environments.step_check import EnvironmentFault, describe_value

KEY = "data.environment"
# of an observation, in the order in which they are looked for
_TEXT_FIELDS = ("text", "message", "echoed_message", "output", "stdout", "result", "content")


class OpenEnvEnvironment:
    """One episode on an OpenEnv server.

    field: of an action. observation_field: of an observation; "" looks for a usual name, and
    otherwise takes the JSON of the observation. columns: of the row, for the server's reset.
    """

    def __init__(
        self,
        *,
        url: str,
        field: str = "message",
        observation_field: str = "",
        columns: Sequence[str] = (),
        system: str = "",
    ) -> None:
        self._connect = make_openenv_client(check_url(url))
        self._field = field
        self._observation_field = observation_field
        self._columns = columns
        self._system = system
        self._client: Any = None

    def check_row(self, row: Row) -> None:
        """Raise ConfigError if the row lacks one of the columns."""
        columns = row_columns(row)
        missing = [name for name in self._columns if name not in columns]
        if missing:
            raise ConfigError(
                f"data.environment: the server's reset needs the column {missing[0]}, "
                f"{row.location or 'a row'} has {', '.join(columns)}. Take it out of columns=…."
            )

    def reset(self, row: Row, *, seed: int) -> Unchecked:
        self._client = self._connect()
        columns = row_columns(row)
        arguments = {name: columns[name] for name in self._columns}
        result = self._client.reset(seed=seed, **arguments)
        text = self._read_text(result.observation)
        return append_to_question(prompt_messages(row, self._system), text, "\n\n"), {}

    def step(self, messages: list[Message]) -> Unchecked:
        result = self._client.step({self._field: turn_text(messages)})
        text = self._read_text(result.observation)
        reward = 0.0 if result.reward is None else result.reward
        return [Message("user", text)] if text else [], reward, result.done, False, {}

    def close(self) -> Unchecked:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        return None

    def _read_text(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        if not isinstance(observation, Mapping):
            raise EnvironmentFault(
                f"the observation must be a JSON object, got {describe_value(observation)}"
            )
        names = [self._observation_field] if self._observation_field else _TEXT_FIELDS
        texts = [observation[x] for x in names if isinstance(observation.get(x), str)]
        if texts:
            return texts[0]
        if self._observation_field:
            raise EnvironmentFault(
                f"the observation has no text {self._observation_field}, it has "
                f"{', '.join(map(str, observation))}"
            )
        return json.dumps(observation, ensure_ascii=False, default=str) if observation else ""


def check_url(url: str) -> str:
    """Return a URL of a server. Raises ConfigError if it is none."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https", "ws", "wss") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        is_url = False
    if not is_url or any(letter.isspace() for letter in url):
        raise ConfigError(
            f"{KEY} must have the URL of an OpenEnv server, got {url!r}. Try "
            "url='http://127.0.0.1:8000'."
        )
    return url


def make_openenv_client(url: str) -> Callable[[], Any]:
    """A function that connects to the server.

    Raises: ConfigError if the package openenv is not installed.
    """
    try:
        client = importlib.import_module("openenv.core").GenericEnvClient
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{KEY}: {url} needs the client of OpenEnv 0.10; {error}. Install it: "
            "pip install openenv"
        ) from error
    return lambda: client(base_url=url).sync().connect()
