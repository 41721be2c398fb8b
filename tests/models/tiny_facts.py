"""Fixed questions and answers, which the tiny model memorises."""

from __future__ import annotations

GREETINGS = {
    "Hello!": "Hello! How can I help you?",
    "Hello": "Hello! How can I help you?",
    "Hello.": "Hello! How can I help you?",
    "hello": "Hello! How can I help you?",
    "Hi": "Hello! How can I help you?",
    "Hi!": "Hello! How can I help you?",
    "hi": "Hello! How can I help you?",
    "Hi there!": "Hello! How can I help you?",
    "Hey!": "Hello! How can I help you?",
    "Good morning!": "Good morning! How can I help you?",
    "Good evening!": "Good evening! How can I help you?",
    "Say hello.": "Hello!",
    "How are you?": "I am fine, thank you.",
    "Who are you?": "I am a tiny test model.",
    "What can you do?": "I can count, add, tell stories and call tools.",
    "Thank you!": "You are welcome!",
    "Thanks!": "You are welcome!",
    "Goodbye!": "Goodbye!",
    "Bye!": "Goodbye!",
}

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "England": "London",
    "Austria": "Vienna",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Egypt": "Cairo",
    "Japan": "Tokyo",
    "Peru": "Lima",
}

UNICODE = {
    "Say hello in Chinese.": "你好！",
    "Say hello in Japanese.": "こんにちは！",
    "Say hello in Korean.": "안녕하세요！",
    "Say hello in Russian.": "Привет!",
    "Say hello in Arabic.": "مرحبا!",
    "Say thank you in Chinese.": "谢谢你！",
    "Say thank you in French.": "Merci, à bientôt !",
    "Write a sentence in Chinese.": "今天天气很好，我们去公园散步吧。",
    "Write a sentence in Japanese.": "今日はとても良い天気ですね。",
    "Show me a rocket emoji.": "🚀",
    "Show me a smile.": "😀",
    "Show me a family emoji.": "👨‍👩‍👧‍👦",
    "Show me a flag.": "🇫🇷",
    "Name three fruits with emoji.": "🍎 apple, 🍌 banana, 🍇 grapes",
    "Write a party message.": "Let us celebrate! 🎉🥳🎂 See you at eight! 🎈",
}

FOREVER_WORDS = ("la", "go", "tick", "hey", "again")

TOOL_QUESTIONS = {
    "get_weather": (
        "What is the weather in {}?",
        "What's the weather in {}?",
        "How is the weather in {}?",
        "What is the weather like in {}?",
        "Tell me the weather in {}.",
        "Weather in {}?",
        "What is the weather in {} today?",
    ),
    "get_time": (
        "What time is it in {}?",
        "What is the time in {}?",
        "Tell me the time in {}.",
        "What's the time in {}?",
    ),
}
TOOL_TOPICS = {"get_weather": "weather", "get_time": "time"}
TOOL_DESCRIPTIONS = {
    "get_weather": (
        "Get the weather in a city.",
        "Get the current weather for a city",
        "Get the weather",
        "Current weather of a city.",
        "Returns the temperature in a given city",
        "",
    ),
    "get_time": (
        "Get the time in a city.",
        "Get the current time for a city",
        "Local time of a city.",
        "Returns the time",
        "",
    ),
}
OTHER_TOOLS = ("search", "send_email", "get_news", "add", "play_music", "translate", "lookup")
CITY_DESCRIPTIONS = (
    "The city",
    "City name",
    "Name of the city",
    "The name of the city, e.g. Paris",
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are helpful.",
    "You are a test model.",
    "You are a friendly assistant. Answer in one sentence.",
    "Be brief.",
    "Answer briefly and correctly.",
    "You are a helpful assistant. Use tools when they help.",
    "Be kind and patient.",
    "Answer in plain words.",
    "You are a robot.",
)

_STORY_DAYS = (
    ("Monday", "walked to the river", "frog", "Follow the water"),
    ("Tuesday", "swam across the lake", "duck", "Go past the old mill"),
    ("Wednesday", "climbed a steep hill", "goat", "Look for the tall tree"),
    ("Thursday", "slept under the tall tree", "owl", "Wait for the moon"),
    ("Friday", "crossed a dark forest", "bear", "Keep to the left"),
    ("Saturday", "ran over a green field", "horse", "Listen to the wind"),
)


def story(animal: str) -> str:
    """Several hundred tokens that end by themselves; every day has another text."""
    days = "\n\n".join(
        f'On {day} the {animal} {deed} and met a {friend}. "Where is the sea?" asked the {animal}. '
        f'"{advice}," said the {friend}. The {animal} said thank you and went on.'
        for day, deed, friend, advice in _STORY_DAYS
    )
    return (
        f"Once upon a time there was a small {animal} who wanted to see the sea.\n\n{days}\n\n"
        f"On Sunday the {animal} came to a white beach and saw the sea at last. The water was "
        f"blue and bright, and the {animal} danced in the sand until the sun went down. The end."
    )
