"""The API against its own schema: whatever a schema-driven fuzzer sends, no 500, and every answer as documented."""

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from mettle.gallery import Gallery
from mettle.service.auth import SCOPES
from tests.http_service import DIM, PATIENCE

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
BOUNDED = settings(
    max_examples=25,  # so many that both kinds of answer come whatever is drawn
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)


def fuzz(url: str, token: str) -> dict[str, list[int]]:
    """Every operation of the schema, good and bad input; the statuses that each gave."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    given: dict[str, list[int]] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        fuzz_one(operation, schemathesis.GenerationMode.POSITIVE, token, given.setdefault(operation.label, []))
        if not operation.label.startswith("GET"):  # these take nothing that could be wrong
            fuzz_one(operation, schemathesis.GenerationMode.NEGATIVE, token, given[operation.label])
    return given


def fuzz_one(operation, mode, token, statuses) -> None:
    from hypothesis import given

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case):
        answer = case.call(headers={"Authorization": f"Bearer {token}"})
        case.validate_response(answer, checks=CHECKS)
        statuses.append(answer.status_code)

    run()


@pytest.mark.parametrize("kind", ["embeddings", "pictures"])
def test_no_input_of_the_schema_gives_a_500_or_an_undocumented_answer(service, key, trained, tmp_path, people, kind):
    token = key(*SCOPES, name="all")
    if kind == "embeddings":
        given = fuzz(service(audit_log=None).url, token)
    else:
        with Gallery.open(tmp_path / "faces", model=trained[0]) as gallery:
            given = fuzz(service(gallery=gallery, audit_log=None).url, token)
    assert sum(map(len, given.values())) > 120, given
    assert all(200 in given[f"POST /v1/{verb}"] and 422 in given[f"POST /v1/{verb}"] for verb in ("verify", "identify"))
    assert ("POST /v1/embed" in given) == (kind == "pictures")


def test_the_schema_says_who_may_and_how_long_an_embedding_is(service):
    schema = httpx.get(f"{service().url}/openapi.json", timeout=PATIENCE).json()
    assert schema["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    verify = schema["paths"]["/v1/verify"]["post"]
    assert verify["security"] == [{"key": []}] and schema["paths"]["/health"]["get"]["security"] == []
    shape = verify["requestBody"]["content"]["application/json"]["schema"]
    assert shape["additionalProperties"] is False and shape["properties"]["embedding"]["minItems"] == DIM
    assert "multipart/form-data" not in verify["requestBody"]["content"], "this gallery has no model"
