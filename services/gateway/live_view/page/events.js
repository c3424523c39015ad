// Server-sent events over fetch, because an EventSource cannot carry an API key.

const LONGEST = 8 << 20;

// Yields {event, data} until the stream ends.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const pieces = (rest + value).split("\n\n");
      rest = pieces.pop();
      if (rest.length > LONGEST) throw new Error("an event is too long");
      for (const piece of pieces) yield parsed(piece);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parsed(piece) {
  let event = "message";
  const data = [];
  for (const line of piece.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
    else if (line.startsWith("event:")) event = line.slice(6).trim();
  }
  return { event, data: data.join("\n") };
}
