"""transformers' reporters (TensorBoard, W&B, …) are told of rounds, which they would miss otherwise.

They come before a user's callbacks, so what such a callback adds to the logs they don't see; and they call
everything in the logs `train/…`.
"""

import inspect
import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer_callback import CallbackHandler

_logger = logging.getLogger(__name__)


def log_before_reporters(callback: TrainerCallback) -> None:
    """Have `callback.on_log` called before that of all other callbacks, too. Call it in `on_train_begin`."""
    _keep_names()
    handler = _handler()
    if handler is None:
        _logger.warning(
            "this version of transformers does not show its callbacks: reporters such as TensorBoard's get "
            "no loco/…, which trainer.state.log_history has"
        )
        return
    first = handler.callbacks[0]
    if not (isinstance(first, _OnlyLogs) and first.callback is callback):
        # A new list, since the old one is being gone through.
        handler.callbacks = [_OnlyLogs(callback), *handler.callbacks]


class _OnlyLogs(TrainerCallback):
    def __init__(self, callback: TrainerCallback) -> None:
        self.callback = callback

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        self.callback.on_log(*args, **kwargs)


def _handler() -> CallbackHandler | None:
    """A callback is not told whose it is."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, CallbackHandler):
            return found
        frame = frame.f_back
    return None


@cache
def _keep_names() -> None:
    """Our names are the same in all frameworks."""
    theirs: Callable[[dict[str, Any]], dict[str, Any]] = integration_utils.rewrite_logs

    @wraps(theirs)
    def rewrite(logs: dict[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in logs.items() if name.startswith("loco/")}
        return theirs({name: value for name, value in logs.items() if name not in own}) | own

    integration_utils.rewrite_logs = rewrite
