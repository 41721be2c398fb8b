#!/usr/bin/env bash
# Starts an image's gateway on another port than the default, waits until the image's HEALTHCHECK
# says that it is healthy, and asks the default model a question: scripts/try_image.sh IMAGE
set -euo pipefail

image=$1
docker=${DOCKER:-docker}
container=$("$docker" run --detach --publish 127.0.0.1::9000 --env MLX_GATEWAY_API_KEYS=only-for-this-test \
    "$image" serve --port 9000)
end() {
    "$docker" logs "$container" >&2
    "$docker" rm --force "$container" >/dev/null
}
trap end EXIT

for _ in {1..60}; do
    health=$("$docker" inspect --format '{{.State.Health.Status}}' "$container")
    [ "$health" = starting ] || break
    sleep 5
done
[ "$health" = healthy ] || {
    echo "try_image.sh: the container is $health" >&2
    exit 1
}
address=$("$docker" port "$container" 9000/tcp)
answer=$(curl --fail --silent --show-error --max-time 300 "http://$address/v1/chat/completions" \
    --header 'Authorization: Bearer only-for-this-test' --header 'Content-Type: application/json' --data '{
        "model": "SmolLM2-135M-Instruct", "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}]}')
echo "$answer"
case $answer in
    *Paris*) ;;
    *) exit 1 ;;
esac
