"""Small functions that bugs are planted in, with arguments to test them on: SHOWN of them are shown, others hidden."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

SHOWN = 3


def median(numbers: list[int]) -> float:
    """The middle of the sorted numbers, or the mean of the two middle ones."""
    ordered = sorted(numbers)
    half = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def is_prime(n: int) -> bool:
    """Whether n has no divisor but 1 and itself; 1 and 0 are not prime."""
    if n < 2:
        return False
    for d in range(2, n):
        if d * d > n:
            break
        if n % d == 0:
            return False
    return True


def run_lengths(text: str) -> list[list[object]]:
    """Runs of equal letters as [letter, length]: "aab" gives [["a", 2], ["b", 1]]."""
    runs: list[list[object]] = []
    start = 0
    for i in range(1, len(text) + 1):
        if i == len(text) or text[i] != text[start]:
            runs.append([text[start], i - start])
            start = i
    return runs


def binary_search(numbers: list[int], wanted: int) -> int:
    """The place of a number in a sorted list, -1 where it is not in it."""
    low = 0
    high = len(numbers)
    for _ in range(len(numbers)):
        if low >= high:
            break
        middle = (low + high) // 2
        if numbers[middle] == wanted:
            return middle
        if numbers[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return -1


def merge_sorted(a: list[int], b: list[int]) -> list[int]:
    """The numbers of two sorted lists as one sorted list."""
    merged = []
    i = 0
    j = 0
    for _ in range(len(a) + len(b)):
        if j >= len(b) or (i < len(a) and a[i] <= b[j]):
            merged.append(a[i])
            i += 1
        else:
            merged.append(b[j])
            j += 1
    return merged


def caesar(text: str, shift: int) -> str:
    """Small letters moved on in the alphabet, z to a; other signs stay."""
    moved = ""
    for letter in text:
        if letter >= "a" and letter <= "z":
            moved += chr((ord(letter) - 97 + shift) % 26 + 97)
        else:
            moved += letter
    return moved


def balanced(text: str) -> bool:
    """Whether every ( has its ) after it."""
    depth = 0
    for sign in text:
        if sign == "(":
            depth += 1
        elif sign == ")":
            depth -= 1
            if depth < 0:
                return False
    return depth == 0


def leap_year(year: int) -> bool:
    """Whether a year has a February 29: divisible by 4, and by 400 where it is divisible by 100."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def windows(numbers: list[int], width: int) -> list[int]:
    """The sums of each `width` numbers in a row."""
    sums = []
    for start in range(len(numbers) - width + 1):
        sums.append(sum(numbers[start : start + width]))
    return sums


def to_base(number: int, base: int) -> str:
    """A number >= 0 written in a base from 2 to 10."""
    if number == 0:
        return "0"
    digits = ""
    for _ in range(64):
        if number == 0:
            break
        digits = str(number % base) + digits
        number = number // base
    return digits


def second_largest(numbers: list[int]) -> int | None:
    """The second largest of the different numbers; None where there are fewer than two."""
    different = sorted(set(numbers))
    if len(different) < 2:
        return None
    return different[-2]


def title_words(text: str) -> str:
    """The words with a capital first, except short ones (three letters or fewer) after the first word."""
    words = []
    for i, word in enumerate(text.split()):
        if i == 0 or len(word) > 3:
            words.append(word[:1].upper() + word[1:])
        else:
            words.append(word)
    return " ".join(words)


def change(amount: int, coins: list[int]) -> int:
    """In how many ways an amount can be paid with coins of these values, each as often as needed."""
    ways = [1] + [0] * amount
    for coin in coins:
        for paid in range(coin, amount + 1):
            ways[paid] += ways[paid - coin]
    return ways[amount]


def overlap(a: list[int], b: list[int]) -> int:
    """The length of what two spans [begin, end) share."""
    begin = max(a[0], b[0])
    end = min(a[1], b[1])
    if end <= begin:
        return 0
    return end - begin


def digital_root(number: int) -> int:
    """Digits summed again and again until one is left."""
    for _ in range(20):
        if number < 10:
            break
        total = 0
        for digit in str(number):
            total += int(digit)
        number = total
    return number


FUNCTIONS: Mapping[Callable[..., Any], Sequence[tuple[Any, ...]]] = {
    median: [([3, 1, 2],), ([4, 1, 3, 2],), ([7],), ([9, 9, 1, 5, 3],), ([10, 20],), ([6, 5, 4, 3, 2, 1],),
             ([0, 8, 1],)],
    is_prime: [(7,), (9,), (2,), (1,), (25,), (97,), (91,), (0,), (49,), (3,), (4,)],
    run_lengths: [("aab",), ("abc",), ("zzz",), ("",), ("aabbaa",), ("x",), ("hello",)],
    binary_search: [([1, 3, 5, 7], 5), ([1, 3, 5, 7], 4), ([2], 2), ([], 1), ([1, 3, 5, 7, 9], 9), ([1, 3, 5], 1),
                    ([2, 4, 6, 8, 10, 12], 12), ([2, 4, 6, 8, 10, 12], 8)],
    merge_sorted: [([1, 4], [2, 3]), ([], [5, 6]), ([1, 2], []), ([1, 1, 9], [1, 3]), ([7], [2]),
                   ([0, 5, 8], [1, 2, 9])],
    caesar: [("abc", 2), ("xyz!", 3), ("a b", 25), ("zebra", 1), ("hello, you", 13), ("m", 26), ("quiz", -1)],
    balanced: [("(a)(b)",), ("(()",), (")(",), ("",), ("((x))",), ("())",), ("(",), ("(()())",), ("a)b(",)],
    leap_year: [(2024,), (1900,), (2000,), (2023,), (2100,), (2400,), (1996,), (1800,), (4,)],
    windows: [([1, 2, 3, 4], 2), ([5, 5, 5], 3), ([1, 2], 1), ([9], 1), ([1, 2, 3, 4, 5], 4), ([2, 0, 2], 2)],
    to_base: [(10, 2), (0, 7), (255, 8), (1, 2), (81, 3), (99, 10), (64, 4)],
    second_largest: [([3, 1, 2],), ([5, 5],), ([9, 9, 4],), ([1],), ([2, 8, 8, 7, 7],), ([0, -1, -2],)],
    title_words: [("the old man and the sea",), ("a day in may",), ("over it",), ("one",), ("to have or not",),
                  ("it came from near here",)],
    change: [(5, [1, 2]), (4, [2]), (3, [2]), (10, [1, 2, 5]), (0, [3]), (12, [3, 4]), (7, [1, 3, 5])],
    overlap: [([0, 5], [3, 9]), ([0, 2], [4, 6]), ([1, 8], [2, 3]), ([0, 4], [4, 7]), ([5, 9], [1, 6]),
              ([2, 3], [2, 3])],
    digital_root: [(38,), (5,), (99,), (0,), (987654,), (10,), (19,)],
}  # fmt: skip
