"""Profiles on disk: found by model and hardware, replaced whole, refused where they are damaged."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ragcache_core.errors import ConfigError
from ragcache_core.policy.prefill_cost import PrefillCostModel, StepTimes
from ragcache_core.profiles.files import model_identity
from ragcache_core.profiles.prefill import (
    Profile,
    check_writable,
    find_profile,
    hardware_name,
    load_profile,
    profile_path,
    save_profile,
)
from ragcache_core.sim.testbeds import load_testbed

TIMES = PrefillCostModel((0, 128), (32, 64), ((0.1, 0.2), (0.2, 0.4)))
PROFILE = Profile("demo-1", "one machine", "2026-01-01T00:00:00+00:00", "0.32.0", "float32", 3, 0.05, TIMES)


@pytest.fixture(autouse=True)
def user_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("platformdirs.user_data_dir", lambda name: str(tmp_path / name))
    return tmp_path


@pytest.fixture
def model(tmp_path: Path, demo_model: str) -> Path:
    return Path(shutil.copytree(demo_model, tmp_path / "model"))


def test_a_profile_is_found_again_by_its_model(model: Path) -> None:
    assert find_profile(str(model)) is None
    save_profile(PROFILE, profile_path(str(model)))
    path = find_profile(str(model))
    assert path is not None
    assert load_profile(path) == TIMES
    assert Profile.from_dict(json.loads(path.read_text())) == PROFILE
    assert find_profile("org/model") is None


def test_what_was_measured_beside_the_prefills_is_kept_and_what_was_not_is_left_out(tmp_path: Path) -> None:
    whole = replace(PROFILE, steps=StepTimes(0.01, 0.004, 0.001), tokens_per_gib=131_072.0, host_gib_per_s=2.5)
    save_profile(whole, tmp_path / "whole.json")
    data = json.loads((tmp_path / "whole.json").read_text())
    assert Profile.from_dict(data) == whole
    testbed = load_testbed(str(tmp_path / "whole.json"))
    assert (testbed.steps, testbed.tokens_per_gib, testbed.host_gib_per_s) == (whole.steps, 131_072, 2.5)
    assert testbed.assumed == ("disk_gib_per_s 2",)
    assert not {"steps", "tokens_per_gib", "host_gib_per_s"} & set(PROFILE.to_dict())
    with pytest.raises(ConfigError, match="steps is"):
        Profile.from_dict(data | {"steps": {"request_s": 1}})


def test_every_model_and_every_hardware_has_a_file_of_its_own(user_data_dir: Path) -> None:
    paths = {
        profile_path("org/model", "1 x H200"),
        profile_path("org/model", "8 x H200"),
        profile_path("org-model/x", "1 x H200"),
        profile_path("org/model-x", "1 x H200"),
        profile_path("org/" + "long" * 40, "1 x H200"),
        profile_path("org/" + "long" * 41, "1 x H200"),
    }
    assert len(paths) == 6
    assert all(path.parent == user_data_dir / "ragcache" / "profiles" for path in paths)
    assert all(len(path.name) < 255 for path in paths)


def test_the_identity_of_a_folder_is_its_content_not_its_place(model: Path, demo_model: str) -> None:
    here = model_identity(str(model))
    (model / "README.md").write_text("other words")
    (model.parent / "elsewhere").mkdir()
    moved = Path(shutil.copytree(model, model.parent / "elsewhere" / "model"))
    assert model_identity(str(moved)) == here
    assert model_identity(str(model) + "/") == here
    assert model_identity(demo_model) != here  # another name
    assert model_identity("org/model") == "org/model"


@pytest.mark.parametrize("position", [0, -1])
def test_other_weights_of_the_same_size_are_another_model(model: Path, position: int) -> None:
    before = model_identity(str(model))
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[position] ^= 1
    weights.write_bytes(content)
    assert model_identity(str(model)) != before


def test_another_configuration_or_file_of_weights_is_another_model(model: Path) -> None:
    identities = {model_identity(str(model))}
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    identities.add(model_identity(str(model)))
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    identities.add(model_identity(str(model)))
    (model / "model-2.safetensors").write_bytes(b"")
    identities.add(model_identity(str(model)))
    (model / "config.json").unlink()
    identities.add(model_identity(str(model)))
    assert len(identities) == 5


def test_the_hardware_is_the_gpus_where_there_are_any(tmp_path: Path) -> None:
    for i, name in enumerate(("NVIDIA H200", "NVIDIA A100", "NVIDIA H200")):
        folder = tmp_path / "driver" / "nvidia" / "gpus" / f"0000:{i}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 17\nVideo BIOS: \t 96.00\n")
    (tmp_path / "cpuinfo").write_text("model name\t: AMD EPYC\n")
    assert hardware_name(tmp_path) == "1 x NVIDIA A100, 2 x NVIDIA H200"


def test_the_hardware_is_the_processor_and_its_cores_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9\n\nprocessor\t: 1\nmodel name\t: x\n")
    assert hardware_name(tmp_path) == f"AMD EPYC 9, {os.cpu_count()} cores"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n")
    assert hardware_name(tmp_path).endswith(f", {os.cpu_count()} cores")
    assert hardware_name() == hardware_name()


def test_a_profile_that_could_not_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "profile.json"
    save_profile(PROFILE, path)

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_profile(replace(PROFILE, num_repeats=9), path)
    assert Profile.from_dict(json.loads(path.read_text())) == PROFILE
    assert list(path.parent.iterdir()) == [path]


def damaged(content: str) -> str:
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged, "cannot be used .Unterminated string|cannot be used .Expecting"),
        (lambda _: "", "Expecting value"),
        (lambda _: "[]", "the file is not a profile"),
        (lambda _: "[" * 100_000, "recursion"),
        (lambda content: content.replace('"ragcache profile"', '"something"'), "the file is not a profile"),
        (lambda content: content.replace('"num_repeats": 3', '"num_repeats": "3"'), "the file is not a profile"),
        (lambda content: content.replace('"float32"', "7"), "the file is not a profile"),
        (lambda content: content.replace("0.4", "-0.4"), "is -0.4; a time must be a positive"),
        (lambda content: content.replace("0.4", "NaN"), "is nan"),
        (lambda content: content.replace('"format": 1,\n "model"', '"format": 2,\n "model"'), "its format is 2"),
        (lambda _: "\udcff", "can't decode byte"),
    ],
)
def test_a_damaged_profile_is_refused(tmp_path: Path, damage: object, message: str) -> None:
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    content = path.read_text()
    changed = damage(content)  # type: ignore[operator]
    assert changed != content
    path.write_text(changed, errors="surrogateescape")
    with pytest.raises(ConfigError, match=message) as refused:
        load_profile(path)
    assert str(path) in str(refused.value)
    assert str(refused.value).endswith("run 'ragcache profile' again")


def test_a_place_that_cannot_hold_a_profile_is_refused_beforehand(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folders" / "profile.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a folder: name a file"):
        check_writable(tmp_path)
    with pytest.raises(ConfigError, match="file is no writable folder"):
        check_writable(tmp_path / "file" / "profile.json")
