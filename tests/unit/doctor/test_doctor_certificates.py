# SPDX-License-Identifier: Apache-2.0
"""Certificates as doctor judges them: real ones, each wrong in one way."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme

from twinpool.config import TlsConfig, TwinpoolConfig
from twinpool.control.doctor.certificates import check_certificates, refusal
from twinpool.control.doctor.finding import Finding, Status

NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def write(directory: Path, ca: trustme.CA, *, key: trustme.LeafCert | None = None, begin: datetime = NOW - DAY,
          end: datetime = NOW + 90 * DAY, trusted: trustme.CA | None = None) -> dict[str, str]:  # fmt: skip
    files = {name: str(directory / name) for name in ("cert_file", "key_file", "ca_file")}
    leaf = ca.issue_cert("127.0.0.1", not_before=begin, not_after=end)
    Path(files["cert_file"]).write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
    Path(files["key_file"]).write_bytes((key or leaf).private_key_pem.bytes())
    Path(files["ca_file"]).write_bytes((trusted or ca).cert_pem.bytes())
    return files


def judged(files: dict[str, str]) -> Finding:
    (found,) = check_certificates(TwinpoolConfig(tls=TlsConfig(**files)))
    assert found.name == "certificate tls"
    assert found.status is Status.OK or (found.matters and found.remedy)
    return found


def test_a_good_pair(tmp_path: Path) -> None:
    found = judged(write(tmp_path, trustme.CA()))
    assert found.status is Status.OK
    assert f"{NOW + 90 * DAY:%Y-%m-%d}" in found.detail


@pytest.mark.parametrize(
    ("begin", "end", "status", "said"),
    [
        (NOW - 3 * DAY, NOW - DAY, Status.FAILED, f"expired at {NOW - DAY:%Y-%m-%d}"),
        (NOW + DAY, NOW + 3 * DAY, Status.FAILED, f"not valid before {NOW + DAY:%Y-%m-%d}"),
        (NOW - DAY, NOW + 2 * DAY, Status.WARNING, "for 2.0 days"),
    ],
)
def test_time(tmp_path: Path, begin: datetime, end: datetime, status: Status, said: str) -> None:
    files = write(tmp_path, trustme.CA(), begin=begin, end=end)
    found = judged(files)
    assert found.status is status
    assert said in found.detail
    if status is Status.FAILED:
        assert files["cert_file"] in found.detail
        assert said in refusal(TlsConfig(**files))


def test_a_key_of_another_certificate(tmp_path: Path) -> None:
    ca = trustme.CA()
    files = write(tmp_path, ca, key=ca.issue_cert("127.0.0.1"))
    assert judged(files).detail == f"{files['key_file']} is not the key of {files['cert_file']}"


def test_a_ca_that_did_not_sign_it(tmp_path: Path) -> None:
    files = write(tmp_path, trustme.CA(), trusted=trustme.CA())
    found = judged(files)
    assert found.status is Status.FAILED
    assert f"is not in {files['ca_file']}" in found.detail


def test_a_chain_through_an_intermediate(tmp_path: Path) -> None:
    root = trustme.CA()
    middle = root.create_child_ca()
    assert judged(write(tmp_path, middle, trusted=root)).status is Status.OK


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    files = write(tmp_path, trustme.CA())
    Path(files["ca_file"]).write_text("nothing")
    assert f"{files['ca_file']} holds no certificate" in judged(files).detail
    Path(files["ca_file"]).unlink()
    assert judged(files).detail == f"{files['ca_file']}: No such file or directory"


def test_nothing_is_said_where_nothing_is_named() -> None:
    assert check_certificates(TwinpoolConfig()) == []
    assert refusal(None) == ""
