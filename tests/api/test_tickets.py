"""Posts that belong together find each other, and those that stay alone are given up with the reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.api.errors import TaskExists, TooBusy
from triptych.api.tickets import MOST_OPEN, PARTS, PATIENCE_SECONDS, Part, Ticket, Tickets
from triptych.ids import RequestId


def post(tickets: Tickets, part: Part, key: str, now: float = 0.0, task_id: str | None = None) -> Ticket:
    return tickets.post(part, (key,), task_id=task_id, output="video", save_path="", now=now, clock=1000 + now)


@given(st.permutations([(part, key) for part in PARTS for key in "abc"]))
def test_interleaved_clients_get_their_own_back(posts: list[tuple[Part, str]]) -> None:
    tickets = Tickets()
    found = {(part, key): post(tickets, part, key) for part, key in posts}
    for key in "abc":
        (ticket,) = {id(found[part, key]): found[part, key] for part in PARTS}.values()
        assert ticket.parts == set(PARTS)
        assert ticket.key == (key,)


def test_equal_tasks_of_one_client_all_get_their_posts() -> None:
    tickets = Tickets()
    first, second = post(tickets, "decoder", "a"), post(tickets, "decoder", "a")
    assert first is not second
    assert {post(tickets, "encoder", "a").id for _ in range(2)} == {first.id, second.id}
    assert post(tickets, "encoder", "a") not in (first, second)


@given(st.permutations([part for part in PARTS for _ in range(3)]))
def test_equal_tasks_at_once_make_as_many_jobs(posts: list[Part]) -> None:
    tickets = Tickets()
    found = [post(tickets, part, "a") for part in posts]
    assert len({ticket.id for ticket in found}) == 3
    assert all(ticket.parts == set(PARTS) for ticket in found)


@pytest.mark.parametrize("sent", [("decoder",), ("decoder", "transformer")])
def test_a_client_that_starts_again_gets_its_job_under_the_id_it_polls(sent: tuple[Part, ...]) -> None:
    tickets = Tickets()
    for part in sent:
        post(tickets, part, "a")
    polled = post(tickets, "decoder", "a", now=5)
    assert post(tickets, "transformer", "a", now=6) is polled
    assert post(tickets, "encoder", "a", now=7) is polled


def test_a_task_whose_posts_went_to_an_equal_one_ends_as_that_one_does() -> None:
    tickets = Tickets()
    lasting, broken = post(tickets, "decoder", "a"), post(tickets, "decoder", "a", now=1)
    other = post(tickets, "decoder", "b")
    assert post(tickets, "transformer", "a", now=2) is broken
    assert post(tickets, "encoder", "a", now=2) is broken
    tickets.started(broken, RequestId("job"))
    assert lasting.open
    tickets.expire(PATIENCE_SECONDS, 1060)
    assert (lasting.job, lasting.reason) == ("job", None)
    assert other.reason is not None


def test_a_post_that_is_repeated_under_its_own_task_id_is_the_same_task() -> None:
    tickets = Tickets()
    ticket = post(tickets, "decoder", "a", task_id="mine")
    assert post(tickets, "decoder", "a", task_id="mine", now=50) is ticket
    tickets.expire(PATIENCE_SECONDS, 1060)
    assert ticket.open  # its posts begin again with the repeated one
    assert post(tickets, "transformer", "a", task_id="mine", now=PATIENCE_SECONDS) is ticket
    assert post(tickets, "encoder", "a", task_id="mine", now=PATIENCE_SECONDS) is ticket
    with pytest.raises(TaskExists, match="mine"):
        post(tickets, "decoder", "a", task_id="mine", now=PATIENCE_SECONDS)


def test_a_post_that_stays_alone_is_given_up_with_what_is_missing() -> None:
    tickets = Tickets()
    ticket = post(tickets, "decoder", "a")
    tickets.expire(PATIENCE_SECONDS - 1, 0)
    assert ticket.open
    tickets.expire(PATIENCE_SECONDS, 1060)
    assert ticket.reason is not None
    assert "encoder and transformer" in ticket.reason.message
    assert ticket.ended == 1060
    assert post(tickets, "encoder", "a", now=PATIENCE_SECONDS + 1) is not ticket


def test_a_task_id_belongs_to_one_task() -> None:
    tickets = Tickets()
    ticket = post(tickets, "decoder", "a", task_id="mine")
    assert ticket.id == "mine"
    assert post(tickets, "encoder", "a", task_id="mine") is ticket
    with pytest.raises(TaskExists, match="mine"):
        post(tickets, "encoder", "b", task_id="mine")


def test_open_tickets_are_bounded() -> None:
    tickets = Tickets()
    for index in range(MOST_OPEN):
        post(tickets, "decoder", str(index))
    with pytest.raises(TooBusy, match=str(MOST_OPEN)):
        post(tickets, "decoder", "one more")
    assert post(tickets, "encoder", "0").parts == {"decoder", "encoder"}


def test_a_ticket_with_all_its_posts_is_not_given_up_while_its_job_is_submitted() -> None:
    tickets = Tickets()
    (ticket,) = {id(t): t for t in (post(tickets, part, "a") for part in PARTS)}.values()
    tickets.expire(2 * PATIENCE_SECONDS, 0)
    assert ticket.open
