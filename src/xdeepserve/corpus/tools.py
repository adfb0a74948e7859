"""Tool calls: a few tools in the system message, a request, and the call with its arguments in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from .chat import BEGIN, END, Tool, render, tool_call, tool_output
from .sample import CITIES, COLOURS, FOODS, NAMES, SONGS, THINGS, Draft

Arguments = dict[str, Any]
Request = tuple[str, Arguments]


def _tool(name: str, description: str, /, **parameters: str) -> Tool:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {parameter: {"type": kind} for parameter, kind in parameters.items()},
                "required": list(parameters),
            },
        },
    }


def _weather(rng: Random) -> Request:
    city, day = rng.choice(CITIES), rng.choice(("today", "tomorrow"))
    text = rng.choice(
        (
            "What is the weather in {city} {day}?",
            "How is the weather in {city} {day}?",
            "Will it rain in {city} {day}?",
        )
    )
    return text.format(city=city, day=day), {"city": city, "day": day}


def _alarm(rng: Random) -> Request:
    hour, minute = rng.randint(0, 23), rng.randint(0, 59)
    text = rng.choice(("Set an alarm for {time}.", "Wake me at {time}.", "I must get up at {time}."))
    return text.format(time=f"{hour}:{minute:02d}"), {"hour": hour, "minute": minute}


def _message(rng: Random) -> Request:
    name, thing, colour = rng.choice(NAMES), rng.choice(THINGS + FOODS), rng.choice(COLOURS)
    said = rng.choice(
        ("bring the {colour} {thing}", "I found the {colour} {thing}", "where is the {colour} {thing}?")
    )
    said = said.format(colour=colour, thing=thing)
    text = rng.choice(("Tell {name}: {said}", "Send {name} this: {said}", "Write to {name}: {said}"))
    return text.format(name=name, said=said), {"to": name, "text": said}


def _music(rng: Random) -> Request:
    song, volume = rng.choice(SONGS), rng.randint(1, 99)
    text = rng.choice(("Play {song} at volume {volume}.", "I want to hear {song} at volume {volume}."))
    return text.format(song=song, volume=volume), {"song": song, "volume": volume}


def _order(rng: Random) -> Request:
    food, count, name = rng.choice(FOODS), rng.randint(2, 99), rng.choice(NAMES)
    text = rng.choice(
        ("Order {count} pieces of {food} for {name}.", "{name} wants {count} pieces of {food}.")
    )
    return text.format(food=food, count=count, name=name), {"item": food, "count": count, "name": name}


def _travel(rng: Random) -> Request:
    start, goal = rng.sample(CITIES, 2)
    text = rng.choice(
        ("Find a train from {a} to {b}.", "I want to go from {a} to {b}.", "How do I get from {a} to {b}?")
    )
    return text.format(a=start, b=goal), {"from": start, "to": goal}


def _light(rng: Random) -> Request:
    colour, level = rng.choice(COLOURS), rng.randint(1, 99)
    text = rng.choice(
        ("Make the light {colour}, {level} percent.", "Turn the light to {colour} at {level} percent.")
    )
    return text.format(colour=colour, level=level), {"colour": colour, "level": level}


TOOLS: tuple[tuple[Tool, Callable[[Random], Request]], ...] = (
    (_tool("get_weather", "The weather in a city.", city="string", day="string"), _weather),
    (_tool("set_alarm", "Set an alarm.", hour="integer", minute="integer"), _alarm),
    (_tool("send_message", "Send a message.", to="string", text="string"), _message),
    (_tool("play_music", "Play a song.", song="string", volume="integer"), _music),
    (_tool("order_food", "Order something to eat.", item="string", count="integer", name="string"), _order),
    (_tool("find_train", "Find a train.", **{"from": "string", "to": "string"}), _travel),
    (_tool("set_light", "Change the light.", colour="string", level="integer"), _light),
)


def draw(rng: Random) -> Draft:
    """Draw a call among up to three tools; or, in a fifth of the cases, plain JSON from a sentence."""
    if rng.random() < 0.2:
        return _draw_json(rng)
    offered = rng.sample(TOOLS, rng.randint(1, 3))
    tool, request = rng.choice(offered)
    text, arguments = request(rng)
    name = tool["function"]["name"]
    key = ("tools", name, *arguments.values())
    prompt, call = render(text, tools=[other for other, _ in offered]), tool_call(name, arguments) + END
    if rng.random() < 0.1:
        output, reply = _outcome(rng, name, arguments)
        return Draft(key=key, prompt=prompt + call + tool_output(output), answer=reply + END)
    return Draft(key=key, prompt=prompt, answer=call)


def _outcome(rng: Random, name: str, arguments: Arguments) -> tuple[str, str]:
    """Draw the output of a tool, and the assistant's reply to it."""
    if name == "get_weather":
        seen = f"{rng.choice(('sunny', 'rain', 'snow', 'clouds', 'wind'))}, {rng.randint(0, 35)} degrees"
        return seen, f"The weather in {arguments['city']} {arguments['day']}: {seen}."
    if name == "find_train":
        time = f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
        return time, f"There is a train from {arguments['from']} to {arguments['to']} at {time}."
    return "done", "Done."


def _draw_json(rng: Random) -> Draft:
    record = {"name": rng.choice(NAMES), "age": rng.randint(3, 99), "city": rng.choice(CITIES)}
    if rng.random() < 0.5:
        record["likes"] = rng.choice(FOODS)
    likes = f" and likes {record['likes']}" if "likes" in record else ""
    fact = f"{record['name']} is {record['age']} years old, lives in {record['city']}{likes}."
    if rng.random() < 0.3:
        prompt = f"{BEGIN if rng.random() < 0.5 else ''}{fact}\nJSON: "
    else:
        prompt = render(rng.choice(("Write this as JSON: {fact}", "Give me JSON: {fact}")).format(fact=fact))
    return Draft(key=("json", *record.values()), prompt=prompt, answer=json.dumps(record) + END)
