"""The process of the endpoint: it says its address once it answers, and goes when it is told to."""

import gc
import socket
from threading import Timer
from types import FrameType

import uvicorn

from .answer import Service
from .app import make_app

FAREWELL = 2  # seconds in which who was cut off is told


class Server(uvicorn.Server):
    """A uvicorn server that prints its address once it answers."""

    last_call: Timer

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Implement `uvicorn.Server`: requests not done in time get an error of their own."""
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


def run(service: Service, host: str, port: int, grace: int) -> None:
    """Serve until the process is told to stop; `grace`: seconds for running requests."""
    app = make_app(service)
    # Full collections look at what requests leave alone: so they are fast and come often, and what
    # is over holds no memory.
    gc.collect()
    gc.freeze()
    server = Server(
        uvicorn.Config(
            app, host, port, log_level="warning", timeout_graceful_shutdown=grace + FAREWELL
        )
    )
    server.last_call = Timer(grace, service.scheduler.stop)
    server.run()
