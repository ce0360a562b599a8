"""Reading the metrics of other processes, for those who show a whole cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials
from tanghulu.auth.tls import client_context

#: Seconds that a process may take to show its metrics.
DEADLINE_S = 2.0
#: Pages that are fetched side by side.
AT_ONCE = 32

#: A sample's name and labels, and its value.
Samples: TypeAlias = list[tuple[str, Mapping[str, str], float]]


def samples_in(text: str) -> Samples:
    """The samples of one page."""
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def summed(samples: Samples) -> dict[str, float]:
    """Each metric, summed over its labels."""
    totals: dict[str, float] = {}
    for name, _, value in samples:
        totals[name] = totals.get(name, 0.0) + value
    return totals


def summed_by(samples: Samples, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The metric ``name``, summed over all but ``labels``."""
    totals: dict[tuple[str, ...], float] = {}
    for each, known, value in samples:
        if each == name:
            key = tuple(known.get(label, "") for label in labels)
            totals[key] = totals.get(key, 0.0) + value
    return totals


async def scrape(addresses: Iterable[str], credentials: Credentials = NOTHING_TO_SHOW) -> list[Samples | None]:
    """The metrics at each of ``addresses``, for which ``credentials`` are shown.

    None of one that does not answer, nothing of an empty address, or of one that does not let these credentials in.
    """
    slots = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(
        trust_env=False,
        timeout=DEADLINE_S,
        verify=client_context(credentials.tls),
        headers=dict(credentials.metadata),
    ) as http:
        return await asyncio.gather(*(_page(http, slots, each) for each in addresses))


def metrics_url(address: str) -> str:
    """Where the metrics are of a process that publishes ``address``: host:port, with a scheme if it is not http."""
    return f"{'' if '://' in address else 'http://'}{address}/metrics"


async def _page(http: httpx.AsyncClient, slots: asyncio.Semaphore, address: str) -> Samples | None:
    if not address:
        return []
    async with slots:
        try:
            answer = await http.get(metrics_url(address))
            if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                return []
            return samples_in(answer.raise_for_status().text)
        except (httpx.HTTPError, OSError, ValueError):  # ssl's errors may come as they are
            return None
