"""Bytes of Megatron's .bin/.idx, their reading, and every refusal of a wrong pair."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.config.errors import DataError
from yuan_train.data.indexed import HEADER, IndexedDataset, IndexedWriter, bin_path, idx_path, token_dtype

GOLDEN = Path(__file__).parent.parent / "golden" / "indexed"
DOCUMENTS = {
    "uint16": [[1, 2, 3], [65498], [7] * 5, list(range(100, 117)), [0, 0]],
    "int32": [[1, 2, 3], [125498], [7] * 5, [100, *range(60101, 60117)], [0, 0]],
}
VOCAB_SIZE = {"uint16": 65_499, "int32": 135_040}


def write(prefix: Path, documents: list[list[int]], *, vocab_size: int = 100) -> Path:
    with IndexedWriter(prefix, dtype=token_dtype(vocab_size)) as writer:
        for document in documents:
            writer.add(document)
    return prefix


def overwrite(path: Path, offset: int, new: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(new)] = new
    path.write_bytes(content)


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Three documents of 3, 1 and 2 tokens, uint16."""
    return write(tmp_path / "corpus", [[1, 2, 3], [4], [5, 6]])


@pytest.mark.parametrize("name", ["uint16", "int32"])
def test_bytes_equal_those_of_megatron_core(tmp_path: Path, name: str) -> None:
    prefix = write(tmp_path / name, DOCUMENTS[name], vocab_size=VOCAB_SIZE[name])
    assert bin_path(prefix).read_bytes() == bin_path(GOLDEN / name).read_bytes()
    assert idx_path(prefix).read_bytes() == idx_path(GOLDEN / name).read_bytes()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["uint16", "int32"])
def test_bytes_equal_those_of_an_installed_megatron_core(tmp_path: Path, name: str) -> None:
    peer = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    dtype = peer.DType.optimal_dtype(VOCAB_SIZE[name])
    builder = peer.IndexedDatasetBuilder(f"{tmp_path}/peer.bin", dtype=dtype)
    for document in DOCUMENTS[name]:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{tmp_path}/peer.idx")
    prefix = write(tmp_path / "ours", DOCUMENTS[name], vocab_size=VOCAB_SIZE[name])
    assert bin_path(prefix).read_bytes() == (tmp_path / "peer.bin").read_bytes()
    assert idx_path(prefix).read_bytes() == (tmp_path / "peer.idx").read_bytes()
    dataset = peer.IndexedDataset(str(prefix))  # kept in a variable: its arrays are freed with it
    assert [dataset[n].tolist() for n in range(5)] == DOCUMENTS[name]


def test_small_vocabularies_take_two_bytes() -> None:
    assert token_dtype(65_499) == np.uint16
    assert token_dtype(65_500) == np.int32


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    documents=st.lists(st.lists(st.integers(0, 65_000), max_size=9), min_size=1, max_size=30),
    vocab_size=st.sampled_from([65_001, 135_040]),
)
def test_reader_gives_back_what_the_writer_got(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], vocab_size: int
) -> None:
    prefix = write(tmp_path_factory.mktemp("pair") / "corpus", documents, vocab_size=vocab_size)
    dataset = IndexedDataset(prefix)
    assert [dataset.document(number).tolist() for number in range(len(dataset))] == documents
    assert dataset.document_lengths().tolist() == [len(document) for document in documents]
    assert dataset.num_tokens == sum(map(len, documents))
    assert idx_path(prefix).stat().st_size == 42 + 20 * len(documents)


def test_facts_say_what_the_pair_holds(pair: Path) -> None:
    facts = IndexedDataset(pair).facts()
    assert (facts.documents, facts.sequences, facts.tokens, facts.dtype) == (3, 3, 6, "uint16")
    assert (facts.shortest_document, facts.longest_document) == (1, 3)
    assert (facts.bin_bytes, facts.idx_bytes, facts.note) == (12, 102, None)


def test_documents_of_several_sequences_are_read_whole(tmp_path: Path) -> None:
    prefix = tmp_path / "many"
    np.arange(6, dtype="<u2").tofile(bin_path(prefix))
    # Sequences of 3, 1 and 2 tokens; documents of the first two sequences, of none, of the third, of none.
    idx_path(prefix).write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 5)
        + struct.pack("<3i3q5q", 3, 1, 2, 0, 6, 8, 0, 2, 2, 3, 3)
    )
    dataset = IndexedDataset(prefix)
    assert [dataset.document(n).tolist() for n in range(4)] == [[0, 1, 2, 3], [], [4, 5], []]
    assert dataset.document_lengths().tolist() == [4, 0, 2, 0]
    assert dataset.document_starts().tolist() == [0, 4, 4, 6]


def test_yuan_index_with_one_entry_is_read_and_noted(pair: Path) -> None:
    content = idx_path(pair).read_bytes()
    idx_path(pair).write_bytes(content[:26] + struct.pack("<Q", 1) + content[34:70] + struct.pack("<q", 0))
    dataset = IndexedDataset(pair)
    assert [dataset.document(n).tolist() for n in range(3)] == [[1, 2, 3], [4], [5, 6]]
    assert dataset.document_lengths().tolist() == [3, 1, 2]
    assert "Yuan" in (dataset.note or "")


@pytest.mark.parametrize(
    ("offset", "new", "message"),
    [
        (0, b"TNTIDX", "foreign magic: this is the older TNTIDX format"),
        (0, b"PK\x03\x04", "foreign magic b'PK"),
        (9, struct.pack("<Q", 2), "version 2; wanted 1"),
        (17, b"\x09", "unknown type code 9"),
        (17, b"\x07", "type code 7 holds floating-point"),
        (18, struct.pack("<Q", 0), "holds no sequences"),
        (18, struct.pack("<Q", 9), "torn: 102 bytes, wanted 174 for 9 sequences"),
        (26, struct.pack("<Q", 3), "too long: 102 bytes, wanted 94"),
        (34, struct.pack("<i", -3), "sequence 0 has length -3"),
        (34, struct.pack("<i", 4), "sequence 1 starts at byte 6, wanted 8"),
        (
            54,
            struct.pack("<q", 99),
            "offsets must increase by the lengths: sequence 1 starts at byte 99, wanted 6",
        ),
        (70, struct.pack("<q", 1), "starts with 1, wanted 0"),
        (78, struct.pack("<q", 3), "document entries must increase"),
        (94, struct.pack("<q", 2), "the last document entry is 2, wanted the number of sequences 3"),
    ],
)
def test_a_wrong_index_is_refused(pair: Path, offset: int, new: bytes, message: str) -> None:
    overwrite(idx_path(pair), offset, new)
    with pytest.raises(DataError, match=message):
        IndexedDataset(pair)


@pytest.mark.parametrize(
    ("end", "size", "message"),
    [
        (".idx", 101, "torn: 101 bytes, wanted 102"),
        (".idx", 20, f"20 bytes, shorter than the header of {HEADER.size}"),
        (".idx", 0, "0 bytes, shorter than the header"),
        (".idx", 105, "multimodal"),
        (".bin", 10, r"corpus\.bin: truncated: 10 bytes, wanted 12"),
        (".bin", 14, r"corpus\.bin: too long: 14 bytes"),
    ],
)
def test_a_file_of_another_size_is_refused(pair: Path, end: str, size: int, message: str) -> None:
    os.truncate(f"{pair}{end}", size)  # what is added is zeros
    with pytest.raises(DataError, match=message):
        IndexedDataset(pair)


def test_missing_files_name_the_prefix_and_the_command(pair: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"absent: no .*absent\.bin and .*absent\.idx; .*yuan-train preprocess"
    ):
        IndexedDataset(tmp_path / "absent")
    with pytest.raises(DataError, match="did you mean .*/corpus"):
        IndexedDataset(tmp_path / "corp")
    with pytest.raises(DataError, match="there is no folder"):
        IndexedDataset(tmp_path / "nowhere" / "corpus")
    idx_path(pair).unlink()
    Path(f"{pair}.bin.tmp").touch()
    with pytest.raises(DataError, match=r"no .*corpus\.idx; an interrupted preprocess left"):
        IndexedDataset(pair)


def test_a_failure_leaves_nothing_and_keeps_the_older_pair(pair: Path) -> None:
    before = (bin_path(pair).read_bytes(), idx_path(pair).read_bytes())
    with pytest.raises(RuntimeError, match="stop"), IndexedWriter(pair, dtype=np.dtype("<u2")) as writer:
        writer.add([9, 9])
        raise RuntimeError("stop")
    assert sorted(path.name for path in pair.parent.iterdir()) == ["corpus.bin", "corpus.idx"]
    assert (bin_path(pair).read_bytes(), idx_path(pair).read_bytes()) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("num_tokens", [3, 100_000])
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, num_tokens: int) -> None:
    with (
        pytest.raises(DataError, match="corpus: cannot write the token files: No space left"),
        IndexedWriter(tmp_path / "corpus", dtype=np.dtype("<u2")) as writer,
    ):
        writer._bin.close()
        writer._bin = Path("/dev/full").open("wb")
        writer.add([1] * num_tokens)
    assert list(tmp_path.iterdir()) == []


def test_nothing_added_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no documents"):
        write(tmp_path / "corpus", [])
    assert list(tmp_path.iterdir()) == []


def test_a_prefix_must_name_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder"):
        IndexedWriter(f"{tmp_path}/", dtype=np.dtype("<u2"))
    with pytest.raises(DataError, match="wanted the prefix alone"):
        IndexedWriter(tmp_path / "corpus.bin", dtype=np.dtype("<u2"))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write the token files"):
        IndexedWriter(tmp_path / "file" / "corpus", dtype=np.dtype("<u2"))
