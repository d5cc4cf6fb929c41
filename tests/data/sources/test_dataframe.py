"""DataFrames are manifests in memory."""

import numpy as np
import pandas as pd
import pytest

from mettle.data.sources.dataframe import is_dataframe, read_dataframe
from mettle.data.sources.manifest import read_manifest
from mettle.errors import DataError


def table() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "label": ["a", "a", "b", "b"],
            "height": [1.25, 2.0, 1e-7, 3.0],
            "color": ["red", "blue", "red", "blue"],
            "split": ["train", "train", "test", ""],
        }
    )


def test_a_dataframe_reads_as_the_file_that_it_would_be(tmp_path):
    table().to_csv(tmp_path / "t.csv", index=False)
    file, frame = read_manifest(tmp_path / "t.csv"), read_dataframe(table())
    np.testing.assert_array_equal(frame.read(np.arange(4)), file.read(np.arange(4)))
    assert frame.inputs.names == file.inputs.names == ("height", "color=blue", "color=red")
    assert frame.label.names == file.label.names and frame.split.tolist() == file.split.tolist() == [0, 0, 2, -1]
    assert frame.source_name == "python:DataFrame"


def test_images_start_from_a_folder(tmp_path):
    from PIL import Image

    Image.new("RGB", (6, 4), (9, 9, 9)).save(tmp_path / "x.png")
    frame = pd.DataFrame({"path": ["x.png"] * 2, "label": [1, 2]})
    assert read_dataframe(frame, root=tmp_path).read(np.arange(2)).tolist() == [[[[9] * 3] * 6] * 4] * 2


def test_what_is_missing_is_an_error_that_names_the_row():
    frame = table()
    frame.loc[2, "height"] = np.nan
    with pytest.raises(DataError, match="row 2, column 'height'"):
        read_dataframe(frame)
    filled = read_dataframe(frame, missing="mean").read(np.array([2]))[0, 0]
    assert filled == pytest.approx((1.25 + 2.0) / 2)
    with pytest.raises(DataError, match="no rows"):
        read_dataframe(frame.iloc[:0])
    with pytest.raises(DataError, match="no column label"):
        read_dataframe(frame.drop(columns="label"))


def test_a_dataframe_is_known_without_importing_its_library():
    assert is_dataframe(table()) and not is_dataframe({"columns": []}) and not is_dataframe([1])
