"""Reading the metrics of other processes, for displays of a whole cluster.

Addresses come from discovery, so nothing at them is trusted: they are host:port only, the scheme is the cluster's, each
process gets a token that is valid at its address alone, and a page is read up to a bound,
uncompressed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tanghulu.auth.certificate_roles import ROLES
from tanghulu.auth.credentials import NO_TLS, NOTHING_TO_SHOW, Credentials, TlsFiles
from tanghulu.auth.tls import client_context
from tanghulu.errors import InvalidRequest
from tanghulu.types import Address

#: Seconds that a process may take to return its metrics.
DEADLINE_S = 2.0
#: Pages fetched concurrently, and the maximum bytes of one page.
AT_ONCE = 32
MAX_PAGE_BYTES = 8 << 20

#: A sample's name and labels, and its value.
Samples: TypeAlias = list[tuple[str, Mapping[str, str], float]]


def samples_in(text: str) -> Samples:
    """Return the samples of one page; raises ValueError if it is malformed."""
    try:
        return [
            (sample.name, sample.labels, float(sample.value))  # the parser keeps integers of any size
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
    except (IndexError, OverflowError) as error:
        raise ValueError(f"the page is malformed: {error}") from error


def summed(samples: Samples) -> dict[str, float]:
    """Return each metric, summed over its labels."""
    totals: dict[str, float] = {}
    for name, _, value in samples:
        totals[name] = totals.get(name, 0.0) + value
    return totals


def summed_by(samples: Samples, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the metric ``name``, summed over all but ``labels``."""
    totals: dict[tuple[str, ...], float] = {}
    for each, known, value in samples:
        if each == name:
            key = tuple(known.get(label, "") for label in labels)
            totals[key] = totals.get(key, 0.0) + value
    return totals


async def scrape(addresses: Iterable[str], credentials: Credentials = NOTHING_TO_SHOW) -> list[Samples | None]:
    """Return the metrics at each of ``addresses``, host:port, using tokens derived from ``credentials``.

    None for a process that does not answer; empty for an empty address, or if the credentials are rejected.
    """
    slots = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(
        trust_env=False,
        timeout=DEADLINE_S,
        verify=client_context(credentials.tls.to(*ROLES)),
        headers={"accept-encoding": "identity"},
        follow_redirects=False,
    ) as http:
        return await asyncio.gather(*(_page(http, slots, each, credentials) for each in addresses))


def metrics_url(address: str, tls: TlsFiles = NO_TLS) -> str:
    """Return the URL of a process's metrics at its ``address``; raises InvalidRequest unless that is host:port."""
    return f"{'https' if tls else 'http'}://{Address.parse(address)}/metrics"


async def _page(
    http: httpx.AsyncClient, slots: asyncio.Semaphore, address: str, credentials: Credentials
) -> Samples | None:
    if not address:
        return []
    async with slots:
        try:
            url = metrics_url(address, credentials.tls)
            shown = dict(credentials.to(Address.parse(address)).metadata)
            async with asyncio.timeout(DEADLINE_S), http.stream("GET", url, headers=shown) as answer:
                if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                    return []
                text = await _text(answer.raise_for_status())
            return samples_in(text)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, InvalidRequest):
            return None  # an OSError, too: ssl's errors may arrive unwrapped


async def _text(answer: httpx.Response) -> str:
    """Return the page; raises ValueError if it is compressed or too long."""
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise ValueError("the page is compressed, which was not asked for")
    page = bytearray()
    async for part in answer.aiter_raw():
        page += part
        if len(page) > MAX_PAGE_BYTES:
            raise ValueError(f"the page has more than {MAX_PAGE_BYTES} bytes")
    return page.decode()
