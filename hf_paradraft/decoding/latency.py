"""Latencies of the target's forward, by its number of new rows: measured once, kept on disk."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from time import perf_counter

import numpy
import torch
from huggingface_hub.constants import HF_HOME
from transformers import DynamicCache, PreTrainedModel

from ..files import write_json
from ..hardware import device_name, input_device
from ..names import attention_of, with_cache
from ..notes import notes_on
from .budget import RowLatency
from .cache import record_windows, recurrent_layers
from .checks import context_of
from .tree_attention import attention_windows, grouped_heads, without_cudnn_attention

ROWS = (1, 2, 4, 8, 16, 32, 64)
BUDGET_SECONDS = 3.0
SLOPE = 16
CONTEXT = 128
OVER = "_hf_hook", "forward"  # the attributes that wrappers set on a module
FOLDER = Path(HF_HOME) / "paradraft" / "latency"


def _file(model: PreTrainedModel) -> Path:
    """Name the cache file of a model's latencies by everything that affects them.

    That is parts, shape, dtype, attention, device, threads, and torch's version.

    Adapters, quantised and compiled modules have classes of their own, and so have the hooks of
    offloaded ones and the forwards of packed ones.
    """
    config = model.config.get_text_config()
    shape = {
        name: value
        for name, value in config.to_dict().items()
        if isinstance(value, int) and not name.endswith("_id")
    }
    key = [
        type(model).__name__,
        shape,
        str(model.dtype),
        attention_of(model),
        str(getattr(model.config, "quantization_config", None)),
        sorted(
            {
                type(part).__name__
                for module in model.modules()
                for part in (module, *map(vars(module).get, OVER))
            }
        ),
        device_name(input_device(model)),
        torch.__version__,
        BUDGET_SECONDS,
    ]
    return (
        FOLDER / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]}.json"
    )


@torch.no_grad()
@without_cudnn_attention()
def measure(model: PreTrainedModel) -> RowLatency:
    """Measure the seconds of forwards over a short context, small and large in turn.

    This takes some three seconds at most.
    """
    device = input_device(model)
    synchronise = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    recurrent = recurrent_layers(cache)  # their states have one size, whatever they have read
    if recurrent or attention_windows(model) is None:
        record_windows(cache)
    else:
        cache = DynamicCache()  # every layer keeps every token, as in rounds with trees
    given = with_cache(model, cache)
    positions = context_of(model)
    sizes = [rows for rows in ROWS if rows <= positions // 2]
    # measured in any case, or more rows would seem free
    slope = {1, max(rows for rows in sizes if rows <= SLOPE)}
    ids = torch.zeros((1, min(CONTEXT, positions - sizes[-1])), dtype=torch.long, device=device)
    model(ids, use_cache=True, **given)
    times: dict[int, list[float]] = {rows: [] for rows in sizes}
    started = perf_counter()
    while perf_counter() - started < BUDGET_SECONDS and len(times[1]) < 12:
        for rows in sizes:
            if perf_counter() - started > BUDGET_SECONDS and (times[rows] or rows not in slope):
                continue
            synchronise()
            clock = perf_counter()
            with grouped_heads(rows):
                model(ids[:, :1].expand(1, rows), use_cache=True, **given)
            synchronise()
            times[rows].append(perf_counter() - clock)
            if not recurrent:
                cache.crop(-rows)
    # A model whose first forwards fill the budget is known at few sizes; more rows never take less
    # time.
    timed = [rows for rows in sizes if times[rows]]
    return RowLatency(
        timed, numpy.maximum.accumulate([min(times[rows]) for rows in timed]).tolist()
    )


def row_latency(model: PreTrainedModel) -> RowLatency:
    """Look up the latencies of `model` on this machine, or measure them now.

    They are read from disk; measured ones are written there if that is possible.
    """
    # adapters and wrappers come and go
    parts = [len(vars(part).keys() & OVER) for part in model.modules()]
    key = (
        model.dtype,
        model.device,
        len(parts),
        sum(parts),
        torch.get_num_threads(),
        attention_of(model),
    )
    tables = notes_on(model).setdefault("latencies", {})
    if key not in tables:
        file = _file(model)
        try:
            tables[key] = RowLatency(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            tables[key] = latency = measure(model)
            with suppress(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, {"rows": latency.rows, "seconds": latency.seconds})
    return tables[key]
