"""Laws of the bytes between host and guest, and fuzz: a guest that lies loses its connection, nothing else."""

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.sandbox.agent import wire
from perilune.sandbox.agent.wire import Command, Frame, Parser
from perilune.sandbox.errors import InvalidRequest, MachineLost

frames = st.builds(Frame, st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=300))
text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
key = st.text(st.characters(exclude_characters="\0=", exclude_categories=["Cs"]), min_size=1, max_size=10)


@settings(deadline=None)
@given(st.lists(frames, max_size=5), st.integers(1, 50))
def test_frames_survive_any_split(sent: list[Frame], step: int) -> None:
    data = b"".join(frame.pack() for frame in sent)
    parser, got = Parser(), []
    for at in range(0, len(data), step):
        got += parser.feed(data[at : at + step])
    assert got == sent


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_frames_or_a_typed_error(data: bytes) -> None:
    try:
        for frame in Parser().feed(data):
            assert len(frame.payload) <= wire.MAX_FRAME
    except MachineLost:
        pass


def test_oversized_frames_are_refused_both_ways() -> None:
    with pytest.raises(InvalidRequest, match="exceeds"):
        Frame(20, 0, 1, bytes(wire.MAX_FRAME + 1)).pack()
    with pytest.raises(MachineLost):
        Parser().feed(wire.HEAD.pack(20, 1, 0, 1, wire.MAX_FRAME + 1))


@settings(deadline=None)
@given(
    st.builds(
        Command,
        st.lists(text, min_size=1, max_size=4).map(tuple),
        text,
        text,
        st.lists(st.tuples(key, text), max_size=3).map(tuple),
        st.none() | st.tuples(st.integers(1, 500), st.integers(1, 500)),
        st.booleans(),
        text,
    )
)
def test_commands_round_trip(command: Command) -> None:
    assert Command.unpack(command.pack()) == command


def test_nul_in_an_argument_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="NUL"):
        Command(("a\0b",)).pack()


@settings(deadline=None)
@given(st.binary(max_size=120))
def test_directory_records_never_crash(data: bytes) -> None:
    with contextlib.suppress(MachineLost, struct.error, ValueError):  # the client turns all three into MachineLost
        wire.entries(data)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0x100, 0x2, 0x200, 0x4, 0x40]), text), max_size=5), st.integers(1, 30))
def test_changes_survive_any_split(sent: list[tuple[int, str]], step: int) -> None:
    data = b"".join(struct.pack("<II", mask, len(name.encode())) + name.encode() for mask, name in sent)
    buffer, got = bytearray(), []
    for at in range(0, len(data), step):
        buffer += data[at : at + step]
        got += wire.changes(buffer)
    assert [change.name for change in got] == [name for _, name in sent]
