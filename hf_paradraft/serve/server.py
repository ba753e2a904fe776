"""The process of the endpoint: it says its address once it answers, and goes when it is told to."""

import gc
import socket
from threading import Timer
from types import FrameType

import uvicorn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..protocol import Drafter
from .answer import Service
from .app import make_app
from .lessons import Lessons
from .scheduler import Scheduler

FAREWELL = 2  # seconds in which who was cut off is told


class Server(uvicorn.Server):
    """A uvicorn server that prints its address once it answers."""

    last_call: Timer

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Implement `uvicorn.Server`: requests that are not done in time get an error of their own."""
        if not self.should_exit:
            self.last_call.daemon = True
            self.last_call.start()
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Implement `uvicorn.Server`."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            print(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)


def run(
    target: PreTrainedModel,
    drafter: Drafter | None,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    host: str,
    port: int,
    max_batch_size: int,
    max_queue: int,
    api_key: str | None,
    seconds: float,
    grace: int,
    lesson: Lessons | None = None,
) -> None:
    """Serve until the process is told to stop; arguments as for `paradraft serve`."""
    scheduler = Scheduler(target, drafter, max_batch_size, max_queue, lesson)
    context = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    stops = target.generation_config.stop_strings or []
    app = make_app(Service(scheduler, tokenizer, name, context, [stops] if isinstance(stops, str) else stops, api_key, seconds))
    # Full collections look at what requests leave alone: so they are fast and come often, and what is over holds no memory.
    gc.collect()
    gc.freeze()
    server = Server(uvicorn.Config(app, host, port, log_level="warning", timeout_graceful_shutdown=grace + FAREWELL))
    server.last_call = Timer(grace, scheduler.stop)
    server.run()
