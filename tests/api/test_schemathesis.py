"""Requests made up from the OpenAPI document, by the thousand: none breaks the server, and every answer is as the
document says."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from triptych.api.timeouts import TIMEOUTS

WITH_BODY, WITHOUT = 48, 100
"""Requests of each kind (fitting the document, or breaking it somewhere) to each operation; bodies take long to make
up."""


@pytest.fixture(scope="module")
def lab(make_house: Callable[..., Any], house: Any) -> Iterator[Any]:
    """A live server whose model takes no pictures: that a text is a picture cannot be said in a schema."""
    schema = house.service.schema()
    accepts = msgspec.structs.replace(schema, params=tuple(p for p in schema.params if p.name != "image"))
    with make_house(accepts=accepts, playable=True) as lab:
        yield lab


class Known:
    """What is there, for the paths of requests: one finished job, a new one for each to delete, and the model."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._job = self._make()

    def get(self, parameter: str, method: str) -> str:
        """A value for a parameter of a path."""
        if parameter == "name":
            return "painter"
        return self._make() if method == "DELETE" else self._job

    def _make(self) -> str:
        job = self._http.post("/v1/videos", json={"prompt": "a cat"}).json()["id"]
        self._http.get(f"/v1/videos/{job}/events").raise_for_status()  # which ends with the job
        return job


@pytest.fixture(scope="module")
def known(lab: Any) -> Iterator[Known]:
    """What the laboratory has."""
    with httpx.Client(base_url=lab.url, timeout=60) as http:
        yield Known(http)


def judged(case: Any, response: Any, *, fits: bool) -> bool:
    """Whether the document says all about a request's being accepted or refused."""
    body = case.body
    if fits:  # how many seconds fit depends on the frames a second, which a schema cannot say
        return not (response.status_code == 400 and isinstance(body, dict) and {"seconds", "fps"} <= body.keys())
    # Letters of all languages may stand in a path, which no pattern of the document's kind can say.
    named = response.status_code == 200 and isinstance(body, dict) and isinstance(body.get("save_result_path"), str)
    # In a form everything is text, and so nothing of the wrong type.
    return case.media_type != "multipart/form-data" and not named


def give_time(body: Any) -> None:
    """Have no request ask for so little time that it runs out."""
    for name in TIMEOUTS if isinstance(body, dict) else ():
        value = body.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 60:
            body[name] = 60.0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("schemathesis") is None, reason="Schemathesis is not installed")
def test_no_made_up_request_breaks_the_server_or_the_document(lab: Any, known: Known) -> None:
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    always = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.response_headers_conformance,
    ]
    counts: Counter[str] = Counter()

    def check(operation: Any, mode: GenerationMode) -> None:
        fits = mode is GenerationMode.POSITIVE
        verdict = checks.positive_data_acceptance if fits else checks.negative_data_rejection

        @settings(
            max_examples=WITH_BODY if list(operation.body) else WITHOUT,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans())
        def run(case: Any, real: bool) -> None:
            if real and case.path_parameters:
                case.path_parameters = {name: known.get(name, case.method) for name in case.path_parameters}
            give_time(case.body)
            response = case.call(timeout=60)
            counts[operation.label] += 1
            judges = [*always, verdict] if judged(case, response, fits=fits) else always
            case.validate_response(response, checks=judges)

        run()

    for result in schemathesis.openapi.from_url(f"{lab.url}/openapi.json").get_all_operations():
        operation = result.ok()
        check(operation, GenerationMode.POSITIVE)
        if list(operation.query) or list(operation.body):  # nothing else can be wrong with a request
            check(operation, GenerationMode.NEGATIVE)
    assert counts.total() >= 2000, counts
