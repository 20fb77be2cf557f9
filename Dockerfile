# vLLM with kvq as its cache: docker build -t kvq . && docker run --gpus all -p 8000:8000 kvq --model MODEL --method kivi
FROM vllm/vllm-openai:v0.33.0
WORKDIR /opt/kvq
COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY kvq_cli kvq_cli
# vLLM, torch and transformers are the image's.
RUN pip install --no-cache-dir .
# Models outlive the container with -v models:/models, stored prefixes with -v prefixes:/prefixes.
ENV HF_HOME=/models
WORKDIR /models
EXPOSE 8000
ENTRYPOINT ["kvq", "serve", "--host", "0.0.0.0"]
