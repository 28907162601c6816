// Text in addresses. Names of tensors may hold lone surrogates, which UTF-8 has not: they stand as the three bytes that
// UTF-8 would give them, as Python's "surrogatepass" writes and reads them.

/** As encodeURIComponent, which throws on lone surrogates. */
export function percentEncoded(text: string): string {
  const parts = text.split(/(\p{Cs})/u);
  return parts.map((part, n) => (n % 2 ? lone(part.charCodeAt(0)) : encodeURIComponent(part))).join("");
}

function lone(code: number): string {
  const bytes = [0xe0 | (code >> 12), 0x80 | ((code >> 6) & 63), 0x80 | (code & 63)];
  return bytes.map((byte) => `%${byte.toString(16).toUpperCase()}`).join("");
}

/** The text of a part of an address. What is not valid becomes U+FFFD. */
export function percentDecoded(text: string): string {
  const parts = text.split(/(%ED%[AB][0-9A-F]%[89AB][0-9A-F])/i);
  return parts
    .map((part, n) => {
      if (n % 2 === 0) return new URLSearchParams(`x=${part}`).get("x") ?? "";
      const [, second = 0, third = 0] = part.slice(1).split("%").map((byte) => parseInt(byte, 16));
      return String.fromCharCode(0xd000 | ((second & 63) << 6) | (third & 63));
    })
    .join("");
}
