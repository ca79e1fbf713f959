"""Hostile names that registration permits; a page must show them as text and keep its layout."""

NAMES = (
    '<script>alert("x")</script>',
    '"><img src=x onerror=alert(1)>',
    "' OR 1=1 --",
    "{{7*7}} ${7*7} %s%n",
    "../../etc/passwd?a=b#c",
    "🦙",
    "مِقياس-الخادم-١٢٣",
    "שרת-חישוב-ראשי",
    "计算节点-第四机房-甲",
    "Z\u0351\u0346\u0348a\u0310\u0311l\u0307\u0308g\u0309\u030ao\u030b\u030c",
    "W" * 255,
    ("long words that may be broken " * 9)[:254] + "x",
)
